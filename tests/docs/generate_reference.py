"""Writes `docs/reference.md`, `docs/handoffs.md` and the table of plugins in `README.md` from what is registered.

Run it after a change of options, ports, verbs or hooks: `.venv/bin/python tests/docs/generate_reference.py`.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import typer
import typer.main

from posttrain.artifacts.kinds import Kind
from posttrain.cli.app import app
from posttrain.cli.verbs import plugin_verb
from posttrain.contracts.component import Config
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Port
from posttrain.errors import ExitCode
from posttrain.registry import hooks
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.registry.examination import GROUP_OF
from posttrain.registry.options import describe
from posttrain.registry.rules import Ruling, rulebook
from posttrain_plugins.data.formats import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference.md"
RULES = ROOT / "docs" / "handoffs.md"
LOSSES = ROOT / "docs" / "losses"
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- plugins -->\n).*?(?=<!-- /plugins -->)", re.DOTALL)

HANDOFFS = (
    "What one stage hands to the next is an artifact with a manifest: its *facts*. A rule judges the facts that meet "
    "at a node and names one failure. All rules are asked at `plan`, about predictions where nothing is built yet, "
    "and again right before a node starts, about the artifacts that really reach it.",
    "- An **error** that rests on real or predicted facts refuses the run. A **warning** is shown, and the run goes "
    "on: the thing is sometimes meant. A **note** is for those who use the model elsewhere. The level below is the "
    "usual one; some rules are stricter where a policy is trained, and say so.\n"
    "- A finding is *verified* (from artifacts), *predicted* (from what stages say they will put out) or *unknown*. "
    "What is not known is never an error.\n"
    "- What manifests cannot tell is looked at in the first step's tokens and forward passes, before the first "
    "update: ids beyond the embeddings, BOS twice, ends of answers that are there and not learned, rows of weight 0, "
    "texts of unknown characters, a policy that is not its own reference, supervised tokens far less likely than by "
    "guessing (`plugins/posttrain_plugins/training/invariants.py`).",
    "Which injected failures are found, when, and which are missed: "
    "[evidence/handoff-faults.md](evidence/handoff-faults.md). A plugin adds a rule of its own under letters of its "
    "own: [plugins.md](plugins.md#a-stage-and-a-rule).",
)
"""What stands above the rules."""

SAMPLES: Mapping[str, Mapping[str, Any]] = {
    "data.load": {"path": "rows.jsonl"},
    "data.synthetic": {"generator": {"name": "reverse"}, "rows": 1},
    "data.best_of_n": {"reward": {"name": "exact"}},
    "data.convert": {"to": {"name": "messages"}},
    "data.split": {"split": {"test": 0.05}},
    "data.contamination": {"remove": True},
    "model.load": {"path": "model"},
    "store.load": {"path": ".posttrain/store/objects/0"},
    "promote": {"name": "assistant"},
}
"""Options for stages that require some: output ports are asked for under them."""

OUTPUT_NOTES: Mapping[str, str] = {
    "data.load": "With `split`, one port for each part instead: `train` and the names of the split.",
    "data.synthetic": "With `split`, one port for each part instead: `train` and the names of the split.",
    "train.sft": "An adapter with `lora`, with `peft` or from an adapter, else a model.",
    "train.dpo": "An adapter with `lora`, with `peft` or from an adapter, else a model.",
}

EXIT_CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "Completed, or nothing to do.",
    ExitCode.FAILED: "A stage failed; or `diff`, `store verify`, `doctor`, `plugins check` found something.",
    ExitCode.INVALID: "The pipeline, the data, a plugin or a hand-off is wrong; nothing was started.",
    ExitCode.REJECTED: "A gate said no.",
    ExitCode.INCONCLUSIVE: "A gate could not decide.",
    ExitCode.INTERRUPTED: "Stopped by Ctrl-C or SIGTERM; `posttrain resume` goes on.",
}

VARIABLES: Mapping[str, str] = {
    "POSTTRAIN_WORKSPACE": "The workspace directory instead of `.posttrain`; `--workspace` beats it. "
    "`sync`, `ui` and `down` take the option only.",
    "POSTTRAIN_GRACE_SECONDS": "Seconds a stage may take to write a checkpoint when asked to stop; 60 when unset.",
    "POSTTRAIN_DISABLE_PLUGINS": "Plugins that are not imported: names of entry points, distributions or files, "
    "separated by commas.",
    "POSTTRAIN_ALLOW_PLUGINS": "Only these plugins and the built-in ones are imported.",
    "POSTTRAIN_TRACE_PLUGINS": "`1`: print the traceback of every plugin that fails.",
    "POSTTRAIN_TRACEBACK": "Not empty: show tracebacks of errors instead of messages alone.",
}
INTERNAL = frozenset({"POSTTRAIN_LIVENESS_FD", "POSTTRAIN_LOCK_FD"})
"""Set by posttrain for its own stage processes."""
OTHER_VARIABLES: Mapping[str, str] = {
    "MLFLOW_TRACKING_URI": "An MLflow server or database instead of `.posttrain/mlflow.db`.",
    "MLFLOW_REGISTRY_URI": "A model registry of its own.",
    "PREFECT_API_URL": "A Prefect server; no local one is started then.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that stages may be given.",
}

CORE_RUNNERS: Mapping[str, str] = {
    "sequential": "One node after the other, each in its own process; CPU stages are forked from a preloaded one.",
    "process": "As `sequential`, but every node in a fresh interpreter.",
    "inline": "In the calling process, for a debugger; an exception of a stage passes through.",
}


def reference(catalogue: Catalogue) -> str:
    """Return the whole page."""
    parts = [
        "# Reference",
        "Everything here is generated from the code by `tests/docs/generate_reference.py`. The format of pipeline "
        "files is described in [pipelines.md](pipelines.md), the layout of the workspace in "
        "[architecture.md](architecture.md#files-under-posttrain), hooks and contracts in [plugins.md](plugins.md).",
        *_commands(catalogue),
        "## Exit codes",
        _table(
            ("code", "name", "meaning"),
            ((str(int(code)), code.name.lower(), EXIT_CODES[code]) for code in ExitCode),
        ),
        "## Environment variables",
        _table(("variable", "meaning"), ((f"`{k}`", v) for k, v in {**VARIABLES, **OTHER_VARIABLES}.items())),
        "## Artifact kinds and dataset formats",
        "Kinds: " + ", ".join(f"`{kind}`" for kind in Kind) + ".",
        _table(
            ("format", "columns it needs", "becomes"),
            (
                (
                    f"`{name}`",
                    ", ".join(f"`{column}`" for column in each.columns),
                    f"`{each.becomes or name}`",
                )
                for name, each in BUILT_IN.items()
            ),
        ),
        *_stages(catalogue, Group.STAGE, "## Stages"),
        *_stages(catalogue, Group.TRAINER, "## Trainers"),
        *_losses(catalogue),
        *_components(catalogue, Group.CALLBACK, "## Callbacks"),
        *_components(catalogue, Group.BACKEND, "## Backends"),
        *_components(catalogue, Group.REWARD, "## Rewards"),
        *_components(catalogue, Group.GENERATOR, "## Generators"),
        *_rules(catalogue),
        *_runners(catalogue),
        *_listing(catalogue, Group.TRACKER, "## Trackers"),
        *_listing(catalogue, Group.RECIPE, "## Recipes"),
        "## Hooks",
        _table(
            ("hook", "group", "what it registers"),
            (
                (f"`{hook}`", f"`{group}`", _first_line(getattr(hooks, hook)))
                for hook, group in GROUP_OF.items()
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def plugin_table(catalogue: Catalogue) -> str:
    """Return the README's table of what comes with posttrain."""
    shown = (
        Group.STAGE,
        Group.TRAINER,
        Group.CALLBACK,
        Group.BACKEND,
        Group.REWARD,
        Group.GENERATOR,
        Group.RUNNER,
    )
    codes = list(rulebook(catalogue))
    rules = (
        Group.RULE.value,
        f"`{codes[0]}` to `{codes[-1]}`",
        f"{len(codes)} [failures](docs/handoffs.md) at hand-offs",
    )
    formats = ", ".join(f"`{name}`" for name in catalogue.names(Group.FORMAT))
    rows = (
        (group.value, f"`{name}`", catalogue.entry(group, name).registration.summary)
        for group in (*shown, Group.TRACKER, Group.RECIPE)
        for name in catalogue.names(group)
    )
    taken = (Group.FORMAT.value, "[formats](docs/data.md)", f"Rows as people have them: {formats}")
    losses = ", ".join(f"`{name}`" for name in catalogue.names(Group.LOSS))
    learned = (Group.LOSS.value, "[losses](docs/losses/README.md)", f"What is minimized: {losses}")
    return _table(("group", "name", "what it does"), (*rows, learned, taken, rules)) + "\n"


def handoffs(catalogue: Catalogue) -> str:
    """Return the page of hand-off rules."""
    rules = rulebook(catalogue)
    parts = [
        "# Hand-off rules",
        "Generated from the rules' docstrings by `tests/docs/generate_reference.py`. `posttrain explain H012` prints "
        "one, `posttrain explain --rules` lists them.",
        *HANDOFFS,
        _table(("code", "name", "usual level", "failure"), _rule_rows(rules)),
    ]
    for code, found in rules.items():
        rule = found.rule
        parts += [
            f"## {code}: {rule.title}",
            f"`{found.name}`, {rule.level}.",
            rule.text(),
            f"Fix: {rule.fix}.",
        ]
    return "\n\n".join(parts) + "\n"


def built_in() -> Catalogue:
    """Return what comes with posttrain itself, whatever else is installed."""
    return discover(allow=())


# The command line


def _commands(catalogue: Catalogue) -> Iterator[str]:
    yield "## Commands"
    yield "Every verb has `--help`. `--json` prints one JSON document on standard output."
    for name, command in sorted(_verbs(catalogue), key=lambda verb: verb[0]):
        yield f"### `posttrain {name}`"
        yield _sentence(command.help or "")
        yield _table(("argument or option", "default", "meaning"), map(_parameter, _shown(command)))


def _verbs(catalogue: Catalogue) -> Iterator[tuple[str, Any]]:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command
    for name in catalogue.names(Group.COMMAND):
        made = plugin_verb(name, catalogue).made()
        if hasattr(made, "commands"):
            yield from ((f"{name} {inner}", each.made()) for inner, each in made.commands.items())
        else:
            yield name, made


def _shown(command: Any) -> Iterator[Any]:
    hidden = ("help", "install_completion", "show_completion")
    return (parameter for parameter in command.params if parameter.name not in hidden)


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        label = (parameter.metavar or parameter.name.upper()).strip("[]{}")
        spelled = f"`{label}`"
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        spelled = f"`{names}`" if parameter.is_flag else f"`{names} {parameter.metavar or 'VALUE'}`"
    default = parameter.default
    told = "required" if parameter.required else "" if default in (None, False) else f"`{default}`"
    variable = f" Variable: `{parameter.envvar}`." if getattr(parameter, "envvar", None) else ""
    return spelled, told, f"{parameter.help or ''}{variable}"


# What plugins register


def _stages(catalogue: Catalogue, group: Group, title: str) -> Iterator[str]:
    yield title
    for name in catalogue.names(group):
        yield from _heading(catalogue, group, name)
        stage = catalogue.stage(name)
        yield "Inputs:" if stage.inputs else "No inputs."
        if stage.inputs:
            yield _table(("port", "kinds", "notes"), map(_port, stage.inputs))
        yield "Outputs:"
        outputs = stage.outputs(stage.config.model_validate(SAMPLES.get(name, {})))
        yield _table(("port", "kinds", "notes"), map(_port, outputs))
        if name in OUTPUT_NOTES:
            yield OUTPUT_NOTES[name]
        yield from _options(stage.config)


def _components(catalogue: Catalogue, group: Group, title: str) -> Iterator[str]:
    yield title
    for name in catalogue.names(group):
        yield from _heading(catalogue, group, name)
        yield from _options(catalogue.load(group, name).config)


def _losses(catalogue: Catalogue) -> Iterator[str]:
    yield "## Losses"
    yield "Each has a page of its own, with formula, options and a worked example."
    names = catalogue.names(Group.LOSS)
    linked = ((f"[`{name}`](losses/{name.replace('/', '.')}.md)", name) for name in names)
    yield _table(
        ("loss", "family", "what it does"),
        (
            (
                link,
                f"`{catalogue.load(Group.LOSS, name).family}`",
                _sentence(catalogue.entry(Group.LOSS, name).registration.summary),
            )
            for link, name in linked
        ),
    )


def loss_pages(catalogue: Catalogue) -> dict[Path, str]:
    """Return the text of every page under `docs/losses` by its file."""
    found: dict[Path, str] = runpy.run_path(str(Path(__file__).with_name("loss_pages.py")))["pages"](
        catalogue
    )
    return found


def _rules(catalogue: Catalogue) -> Iterator[str]:
    yield "## Hand-off rules"
    yield "Each is explained in [handoffs.md](handoffs.md)."
    yield _table(("code", "name", "usual level", "failure"), _rule_rows(rulebook(catalogue)))


def _rule_rows(rules: Mapping[str, Ruling]) -> Iterator[tuple[str, ...]]:
    for code, found in rules.items():
        yield code, f"`{found.name}`", found.rule.level.value, found.rule.title


def _listing(catalogue: Catalogue, group: Group, title: str) -> Iterator[str]:
    yield title
    yield _table(
        ("name", "what it does"),
        ((f"`{name}`", catalogue.entry(group, name).registration.summary) for name in catalogue.names(group)),
    )


def _runners(catalogue: Catalogue) -> Iterator[str]:
    yield "## Runners"
    registered = {
        name: catalogue.entry(Group.RUNNER, name).registration.summary
        for name in catalogue.names(Group.RUNNER)
    }
    rows = ((f"`{name}`", _sentence(text)) for name, text in {**registered, **CORE_RUNNERS}.items())
    yield _table(("name", "what it does"), rows)


def _heading(catalogue: Catalogue, group: Group, name: str) -> Iterator[str]:
    item = catalogue.entry(group, name).registration
    yield f"### `{name}`"
    yield _sentence(item.summary) + (f" Source: <{item.reference}>." if item.reference else "")
    doc = inspect.getdoc(catalogue.load(group, name))
    if doc:
        yield doc
    if getattr(catalogue.load(group, name), "watches_only", False):
        yield "It only watches, so it is no part of the key."


def _options(model: type[Config]) -> Iterator[str]:
    described = describe(model)
    if not described:
        yield "No options."
        return
    yield "Options:"
    yield _table(("option", "type", "default", "meaning"), (_option(model, each) for each in described))
    for name, inner in _nested(model):
        yield f"Options under {name}:"
        rows = (_option(inner, each) for each in describe(inner))
        yield _table(("option", "type", "default", "meaning"), rows)


def _option(model: type[Config], option: Mapping[str, Any]) -> tuple[str, str, str, str]:
    limits = _limits(model.model_fields[option["name"]].metadata)
    kind = f"`{option['type']}`" + (f" {limits}" if limits else "")
    default = "required" if option["required"] else f"`{json.dumps(option['default'], ensure_ascii=False)}`"
    if not option["description"]:
        raise ValueError(f"the option {option['name']} of {model.__name__} has no description")
    return f"`{option['name']}`", kind, default, "; ".join([option["description"], *option["traits"]])


def _limits(metadata: Iterable[Any]) -> str:
    signs = {
        annotated_types.Ge: "≥",
        annotated_types.Gt: ">",
        annotated_types.Le: "≤",
        annotated_types.Lt: "<",
    }
    return ", ".join(
        f"{sign} {getattr(mark, kind.__name__.lower())}"
        for mark in metadata
        for kind, sign in signs.items()
        if isinstance(mark, kind)
    )


def _nested(model: type[Config]) -> Iterator[tuple[str, type[Config]]]:
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield f"`{name}`{_discriminator(inner)}", inner


def _models(annotation: Any) -> Iterator[type[Config]]:
    """Yield the option models that a type may hold, those of every arm of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _discriminator(model: type[Config]) -> str:
    """Say which literal value leads to this model where several are possible."""
    literals = (
        f" with `{name}: {get_args(field.annotation)[0]}`"
        for name, field in model.model_fields.items()
        if field.is_required() and get_origin(field.annotation) is Literal
    )
    return "".join(literals)


def _port(port: Port) -> tuple[str, str, str]:
    formats = [f"formats {', '.join(f'`{name}`' for name in sorted(port.formats))}"] if port.formats else []
    traits = [trait for trait in ("optional", "many", "training") if getattr(port, trait)]
    return (
        f"`{port.name}`",
        ", ".join(f"`{kind}`" for kind in sorted(port.kinds)),
        "; ".join([*formats, *traits]),
    )


# Text


def _first_line(item: Any) -> str:
    return (inspect.getdoc(item) or "").splitlines()[0]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Write all of them."""
    catalogue = built_in()
    REFERENCE.write_text(reference(catalogue), encoding="utf-8")
    RULES.write_text(handoffs(catalogue), encoding="utf-8")
    losses = loss_pages(catalogue)
    LOSSES.mkdir(exist_ok=True)
    for path in set(LOSSES.glob("*.md")) - set(losses):
        path.unlink()
    for path, text in losses.items():
        path.write_text(text, encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(TABLE.sub(lambda _: plugin_table(catalogue), readme), encoding="utf-8")


if __name__ == "__main__":
    main()
