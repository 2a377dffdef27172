"""`posttrain sft`, `posttrain dpo`, … and `posttrain train NAME`: one training without a pipeline file.

One function serves every registered trainer: a command line becomes a pipeline that loads a model and a dataset and
trains, and that pipeline is run as any other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Voice, Workspace, remark, say, warn
from posttrain.cli.running import Quiet, RunnerName, Tiny
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import SourceMark
from posttrain.errors import DataError, SpecError
from posttrain.registry.components import marked
from posttrain_plugins.commands.asked import TRAIN, Asked, stages_of, with_file
from posttrain_plugins.commands.sources import Overwrite
from posttrain_plugins.registrations.commands import DIRECT

if TYPE_CHECKING:
    from posttrain.contracts.stage import Stage
    from posttrain.pipeline import Pipeline
    from posttrain.planning.plan import Plan
    from posttrain.registry.catalogue import Catalogue

_PREFIX = "train."

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--model_name_or_path",
        metavar="MODEL",
        help="A directory, a GGUF file, a hub id, NODE.PORT or RUN:NODE.PORT of the store, or the start of a digest; "
        "options of `model.load` as --model.revision.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "--dataset_name",
        metavar="DATA",
        help="A file that `data.load` reads, a hub id, or a dataset of the store; options of `data.load` as "
        "--dataset.subset.",
    ),
]
Held = Annotated[
    str | None,
    typer.Option(
        "--eval_dataset", "--eval-dataset", metavar="DATA", help="What to evaluate on while training."
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option("--output_dir", "--output-dir", metavar="DIR", help="Copy the trained model there, too."),
]
Register = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Register the trained model and make it champion of the name."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file with any of these options.")
]
Plugins = Annotated[
    list[str] | None, typer.Option("--plugins", metavar="FILE", help="A local plugin file; may be repeated.")
]
Cpus = Annotated[
    int | None, typer.Option(min=1, help="CPU cores, and so threads, that the training may use.")
]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs that the training may use.")]
Download = Annotated[bool, typer.Option("--download", help="Let hub ids be downloaded.")]
Print = Annotated[
    bool,
    typer.Option("--print", help="Check the pipeline as `plan` does and print it as a file; run nothing."),
]
Help = Annotated[bool, typer.Option("--help", help="Show all options, those of the trainer too.")]


@dataclass(frozen=True)
class Manner:
    """How to go about it."""

    show: bool
    overwrite: bool
    tiny: bool
    runner: str | None
    workspace: Path
    quiet: bool
    as_json: bool


def _verb(name: str | None) -> Callable[..., None]:
    """Return the function of one verb; without a name the first argument names the trainer."""

    def verb(
        context: typer.Context,
        model: Model = None,
        dataset: Dataset = None,
        eval_dataset: Held = None,
        output_dir: OutputDir = None,
        register: Register = None,
        config: ConfigFile = None,
        plugins: Plugins = None,
        cpus: Cpus = None,
        gpus: Gpus = None,
        download: Download = False,
        show: Print = False,
        overwrite: Overwrite = False,
        tiny: Tiny = False,
        runner: RunnerName = None,
        workspace: Workspace = DEFAULT_WORKSPACE,
        quiet: Quiet = False,
        as_json: Json = False,
        help: Help = False,
    ) -> None:
        words = list(context.args)
        named = name or (words.pop(0) if words and not words[0].startswith("-") else None)
        catalogue = _catalogue(plugins or ())
        if help:
            _help(context, named, catalogue)
            return
        given = (model, dataset, eval_dataset, output_dir, register, tuple(plugins or ()))
        asked = with_file(Asked(*given, cpus, gpus, download, tuple(words)), config)
        trainer = _trainer(named, catalogue)
        how = Manner(show, overwrite, tiny, runner, workspace.absolute(), quiet, as_json)
        _train(asked, trainer, catalogue, how)

    verb.__doc__ = (
        f"Train with {_PREFIX}{name}." if name else "Train with any trainer: `posttrain train NAME …`."
    )
    verb.__doc__ += " Every option of the trainer is one here, such as --learning_rate 2e-5 or --lora.r 16."
    verb.context_settings = {  # type: ignore[attr-defined]  # what `posttrain.cli.verbs` looks for
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
    return verb


def _train(asked: Asked, trainer: str, catalogue: Catalogue, how: Manner) -> None:
    """Run the pipeline that is asked for, or print it, in the words of the command line."""
    from posttrain_plugins.commands.direct import Wording

    wording = Wording(
        _called(trainer),
        catalogue.stage(trainer).config,
        {"model": catalogue.stage("model.load").config}
        | dict.fromkeys(("data", "eval"), catalogue.stage("data.load").config),
        copies=asked.output_dir is not None,
    )
    with wording.spoken():
        _carry_out(asked, trainer, catalogue, how, wording.voice)


def _called(trainer: str) -> str:
    short = trainer.removeprefix(_PREFIX)
    return f"posttrain {short if short in DIRECT else f'train {trainer}'}"


def _carry_out(asked: Asked, trainer: str, catalogue: Catalogue, how: Manner, voice: Voice) -> None:
    from posttrain.cli.running import perform
    from posttrain.pipeline import Pipeline, Selection
    from posttrain_plugins.commands.columns import require_fitting

    stages, taken = stages_of(asked, trainer, catalogue, how.workspace)
    remark(taken)
    require_fitting(stages, trainer, _called(trainer), catalogue)
    pipeline, selection = (
        Pipeline(stages, name=_name(trainer), plugins=asked.plugins),
        Selection(tiny=how.tiny),
    )
    if how.show:
        _print(stages, asked, pipeline, pipeline.plan(how.workspace, selection), voice)
        return
    _require_free(asked.output_dir, how.overwrite)
    _require_cached(stages)
    try:
        made = perform(
            pipeline,
            how.workspace,
            selection,
            runner=how.runner,
            quiet=how.quiet,
            as_json=how.as_json,
            voice=voice,
        )
    except typer.Exit:
        if asked.output_dir is not None and not how.as_json:
            say(
                f"nothing was copied to {asked.output_dir}: the same command again, with what went wrong mended, goes "
                "on from the last checkpoint and copies the model"
            )
        raise
    if asked.output_dir is not None:
        base = _copy(made[TRAIN]["model"], how.workspace, asked.output_dir)
        if not how.as_json:
            about = (
                ""
                if base is None
                else f", an adapter on {base}; `--model {asked.output_dir}` goes on with it, and the stage "
                "`model.merge` makes one model of both"
            )
            say(f"the model is in {asked.output_dir}{about}")


def _catalogue(plugins: Sequence[str]) -> Catalogue:
    from posttrain.registry.discovery import discover

    return discover([Path(file).absolute() for file in plugins])


def _trainer(name: str | None, catalogue: Catalogue) -> str:
    """Return the registered name of a trainer; `train.` may be left out.

    Raises:
        SpecError: None is named. PluginError: There is no such trainer.
    """
    known = catalogue.names(Group.TRAINER)
    if name is None:
        raise SpecError("name a trainer", where="posttrain train", expected=f"one of {', '.join(known)}")
    full = name if name in known or "." in name else f"{_PREFIX}{name}"
    return catalogue.entry(Group.TRAINER, full).registration.name


def _name(trainer: str) -> str:
    return trainer.rpartition("/")[2].removeprefix(_PREFIX)


def _print(stages: Mapping[str, Any], asked: Asked, pipeline: Pipeline, planned: Plan, voice: Voice) -> None:
    """Print the pipeline with local paths that lead to the same files from anywhere.

    Raises:
        PosttrainError: It is refused.
    """
    from posttrain.pipeline import require_allowed
    from posttrain_plugins.commands.spelling import anchored, spelled

    warn(planned.warnings, voice)
    require_allowed(planned)
    shown = dict(stages)
    for node in planned.graph.nodes.values():
        sources = {str(value) for _, value in marked(node.config, SourceMark)}
        stage = shown[node.stage]
        if "with" in stage:
            shown[node.stage] = {**stage, "with": anchored(stage["with"], pipeline.base, sources)}
    plugins = {"plugins": [str(file) for file in pipeline.plugin_files]} if asked.plugins else {}
    say(spelled({"name": pipeline.name, **plugins, "stages": shown}).rstrip())


def _require_cached(stages: Mapping[str, Any]) -> None:
    """Refuse hub ids of which nothing is here, where nothing may be downloaded; before anything starts.

    Raises:
        DataError: There is one.
    """
    from posttrain_plugins import hub

    for name, what in (("model", "model"), ("data", "dataset"), ("eval", "dataset")):
        options = stages.get(name, {}).get("with", {})
        if "id" in options and not options.get("download") and not hub.cached(options["id"], what):
            raise DataError(
                f"this {what} of the hub is not in the local cache",
                where=name,
                found=options["id"],
                expected="a path, what is in the store, or a hub id that was downloaded before",
                fix="`download: true` lets it be downloaded",
            )


def _require_free(directory: Path | None, overwrite: bool) -> None:
    if directory is None or not directory.exists():
        return
    if not directory.is_dir():
        raise DataError(
            "this is no directory",
            where="--output_dir",
            found=str(directory),
            expected="a directory, or a path where nothing is",
            fix="name another one",
        )
    if not overwrite and any(directory.iterdir()):
        raise DataError(
            "the output directory is not empty",
            where="--output_dir",
            found=str(directory),
            fix="name another one, or add `--overwrite`",
        )


def _copy(digest: str, workspace: Path, directory: Path) -> Path | None:
    """Copy an artifact's files, without what makes it one, in place of a model that was there.

    Returns:
        Where the base of an adapter lies; the copy names that path, so that peft finds it.
    """
    from posttrain.artifacts.files import guarded
    from posttrain.artifacts.store import Store
    from posttrain_plugins.models.artifact import ADAPTER_CONFIG, MODEL_FILES, write_config
    from posttrain_plugins.templates.tokenizer import read_json

    store = Store(workspace)
    artifact = store.get(digest)
    with guarded(directory, "write the model"):
        for old in [file for pattern in MODEL_FILES for file in directory.glob(pattern)]:
            old.unlink()
        for entry in artifact.manifest.files:
            target = directory / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copyfile(artifact.file(entry.path), target)
        config = read_json(directory / ADAPTER_CONFIG)
        if not config:
            return None
        base = store.get(config["base_model_name_or_path"]).path
        write_config(directory / ADAPTER_CONFIG, {**config, "base_model_name_or_path": str(base)})
    return base


def _help(context: typer.Context, name: str | None, catalogue: Catalogue) -> None:
    """Show the options of the command and those of the trainer."""
    say(context.get_help())
    if name is None:
        say(
            f"\nTrainers: {', '.join(catalogue.names(Group.TRAINER))}. Options of one: `posttrain train NAME --help`."
        )
        return
    from posttrain_plugins.commands.arguments import described

    stage: Stage = catalogue.stage(_trainer(name, catalogue))
    say(f"\nOptions of {_trainer(name, catalogue)}:\n")
    for option, about in described(stage.config).items():
        default = (
            "required" if about["required"] else f"default {json.dumps(about['default'], ensure_ascii=False)}"
        )
        say(f"  --{option}  {about['type']}; {default}\n      {about['description']}")


VERBS = SimpleNamespace(**{name: _verb(name) for name in DIRECT})
"""The verbs that name their trainer, by name."""
train = _verb(None)
