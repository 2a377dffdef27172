"""What holds for every plugin of the catalogue, so that a new one is covered on arrival."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.artifacts.kinds import FACTS_OF
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import Certainty, Input, Level, Stage
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices, validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.validation import config_of

ROOT = Path(__file__).parents[2]

REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "data.synthetic": {"generator": "reverse", "rows": 30, "split": {"test": 0.2}},
    "data.load": {"path": "rows.jsonl"},
    "data.best_of_n": {"reward": "exact"},
    "data.convert": {"to": "messages"},
    "data.split": {"split": {"test": 0.1}},
    "model.load": {"path": "model"},
    "store.load": {"path": "artifact"},
    "promote": {"name": "some"},
}
"""Options that a stage cannot do without."""

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "prefect", "mlflow")


@cache
def catalogue() -> Catalogue:
    return discover()


def names(*groups: Group) -> list[tuple[Group, str]]:
    return [(group, name) for group in groups for name in catalogue().names(group)]


def stage_names() -> list[str]:
    return catalogue().stages()


def configured(name: str) -> tuple[Stage, Any]:
    stage = catalogue().stage(name)
    return stage, validate_config(stage.config, REQUIRED.get(name, {}), catalogue())


COMPONENTS = (Group.LOSS, Group.REWARD, Group.GENERATOR)
OBJECTS = (Group.STAGE, Group.TRAINER, *COMPONENTS, Group.CALLBACK, Group.RULE)


@pytest.mark.parametrize(("group", "name"), names(*OBJECTS))
def test_it_loads_and_says_what_it_is(group: Group, name: str) -> None:
    registration = catalogue().entry(group, name).registration
    loaded = catalogue().load(group, name)
    assert 5 < len(registration.summary) <= 100
    assert registration.summary[0].isupper() or registration.summary[0].isdigit()
    assert not registration.summary.endswith(".")
    assert len((loaded.__doc__ or "").strip()) > 10, "it needs a docstring"


def config_models() -> list[tuple[str, type[Config]]]:
    found = {name: catalogue().stage(name).config for name in stage_names()}
    found |= {
        name: config_of(catalogue().load(group, name)) for group, name in names(*COMPONENTS, Group.CALLBACK)
    }
    return [(name, model) for name, model in found.items() if model is not NoOptions]


@pytest.mark.parametrize(("name", "model"), config_models())
def test_every_option_is_explained(name: str, model: type[Config]) -> None:
    documented = "\n".join(base.__doc__ or "" for base in model.__mro__ if issubclass(base, Config))
    unexplained = [
        option
        for option, field in model.model_fields.items()
        if not field.description and not re.search(rf"^\s+{option}: \S", documented, re.M)
    ]
    assert unexplained == [], f"{name}: give these a description, or a line in the docstring"


@pytest.mark.parametrize("name", stage_names())
def test_options_survive_json(name: str) -> None:
    stage, config = configured(name)
    text = json.dumps(config.model_dump(mode="json"))
    again = validate_config(stage.config, json.loads(text), catalogue())
    assert again == config
    assert json.dumps(again.model_dump(mode="json")) == text


@pytest.mark.parametrize(("group", "name"), names(*COMPONENTS))
def test_options_of_components_have_defaults_that_survive_json(group: Group, name: str) -> None:
    model = config_of(catalogue().load(group, name))
    config = model()
    assert validate_config(model, json.loads(config.model_dump_json()), catalogue()) == config


@pytest.mark.parametrize("name", stage_names())
def test_its_smoke_run_validates_and_keeps_its_ports(name: str) -> None:
    stage, config = configured(name)
    over = {**config.model_dump(mode="json", exclude_unset=True), **stage.shrink(config)}
    small = validate_config(stage.config, {k: v for k, v in over.items() if v is not None}, catalogue())
    assert [port.name for port in stage.outputs(small)] == [port.name for port in stage.outputs(config)]


def unknown_inputs(stage: Stage) -> Iterator[dict[str, list[Input]]]:
    """Yield ports connected to something of which nothing is known: only those that must be, then all."""
    for ports in ([port for port in stage.inputs if not port.optional], stage.inputs):
        for index in range(max((len(port.kinds) for port in ports), default=1)):
            kinds = {port.name: sorted(port.kinds)[index % len(port.kinds)] for port in ports}
            yield {port: [Input(f"some.{port}", kind, FACTS_OF[kind]())] for port, kind in kinds.items()}


@pytest.mark.parametrize("name", stage_names())
def test_unknown_inputs_are_no_problem(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    stage, config = configured(name)
    for inputs in unknown_inputs(stage):
        predicted = stage.predict(config, inputs)
        ports = {port.name: port for port in stage.outputs(config)}
        assert predicted.keys() == ports.keys()
        assert all(predicted[port].kind in ports[port].kinds for port in ports)
        findings = list(stage.check(config, inputs))
        errors = [finding for finding in findings if finding.level == Level.ERROR]
        assert [finding for finding in errors if finding.certainty == Certainty.PREDICTED] == []
        stage.estimate(config, inputs)
        stage.pinned(config)
        for port in ports:
            stage.prompts(config, port, tmp_path)


@pytest.mark.parametrize("name", stage_names())
def test_its_target_can_be_imported(name: str) -> None:
    target = catalogue().stage(name).target
    assert callable(load_target(target))
    # Where stages are looked for that share their code with a stage of another plugin.
    registered = catalogue().entry(Group.STAGE, name).registration.target
    assert target.partition(".")[0] == registered.partition(".")[0]


def test_planning_needs_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from posttrain.registry.discovery import discover\n"
        "catalogue = discover()\n"
        "for entry in catalogue.entries(): catalogue.load(entry.group, entry.registration.name)\n"
        "for name in catalogue.stages(): catalogue.stage(name).target\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", catalogue().names(Group.GENERATOR))
def test_a_generator_depends_on_its_seed_alone(name: str) -> None:
    generator = catalogue().make(Group.GENERATOR, name)
    config = config_of(generator)()
    rows = [dict(row) for row in generator(config, 20, 3)]
    assert len(rows) == 20
    assert {tuple(row) for row in rows} == {tuple(generator.columns)}
    assert [dict(row) for row in catalogue().make(Group.GENERATOR, name)(config, 20, 3)] == rows
    assert [dict(row) for row in generator(config, 20, 4)] != rows


def test_options_of_trainers_name_components_that_exist() -> None:
    for name in catalogue().names(Group.TRAINER):
        _, config = configured(name)
        assert {group for _, _, group in choices(config)} == {Group.LOSS, Group.BACKEND}


@cache
def documentation() -> str:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def announced() -> Iterator[tuple[str, str]]:
    """Yield everything a reader may look for: plugins, hooks, verbs."""
    from posttrain.cli.app import app
    from posttrain.cli.verbs import plugin_verb
    from posttrain.registry import hooks

    for group, name in names(*OBJECTS, Group.RUNNER, Group.TRACKER, Group.COMMAND, Group.RECIPE):
        yield group.value, name
    yield from (("hook", name) for name in vars(hooks) if name.startswith("posttrain_"))
    for name in catalogue().names(Group.COMMAND):
        made = plugin_verb(name, catalogue()).made()
        yield from (("verb", f"{name} {inner}") for inner in getattr(made, "commands", ()))
    for command in app.registered_commands:
        assert command.callback is not None
        yield "verb", command.name or command.callback.__name__
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            assert command.callback is not None
            yield "verb", f"{group.name} {command.name or command.callback.__name__}"


@pytest.mark.parametrize(("kind", "name"), sorted(set(announced())))
def test_it_is_in_the_documentation(kind: str, name: str) -> None:
    written = f"posttrain {name}" if kind in ("verb", "command") else name
    assert re.search(rf"(?<![\w.-]){re.escape(written)}(?![\w-])", documentation())
