"""The JSON Schema of a pipeline file."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Config
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Port, Stage, StageConfig
from posttrain.errors import PluginError
from posttrain.planning.parsing import parse
from posttrain.planning.schema import DIALECT, pipeline_schema
from posttrain.planning.source import read


class Optimizer(Config):
    rate: float = 1e-5


class Train(StageConfig):
    steps: int
    optimizer: Optimizer = Optimizer()


class Load(StageConfig):
    path: str


class Silent(Stage):
    def outputs(self, config: Any) -> tuple[Port, ...]:
        return ()


class TrainStage(Silent):
    config = Train
    inputs = (Port("model", frozenset({Kind.MODEL})), Port("data", frozenset({Kind.DATASET}), optional=True))
    target = "m:run"


class LoadStage(Silent):
    config = Load
    target = "m:run"


class FakeCatalogue:
    stages = {"data/load": LoadStage(), "train.a": TrainStage(), "train.b": TrainStage()}

    def names(self, group: Group) -> list[str]:
        return {Group.STAGE: ["data/load", "broken"], Group.TRAINER: ["train.a", "train.b"]}[group]

    def entry(self, group: Group, name: str) -> SimpleNamespace:
        return SimpleNamespace(registration=SimpleNamespace(summary=f"about {name}"))

    def stage(self, name: str) -> Stage:
        if name == "broken":
            raise PluginError("it does not import")
        return self.stages[name]


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> dict:
    plain = lambda model, catalogue: model.model_json_schema()  # noqa: E731
    monkeypatch.setattr("posttrain.registry.components.config_schema", plain)
    return pipeline_schema(FakeCatalogue())


VALID = {
    "name": "n",
    "defaults": {"train.*": {"with": {"steps": 3}}},
    "stages": {
        "data": {"uses": "data/load", "with": {"path": "x"}},
        "a": {"uses": "train.a", "inputs": {"model": "data"}, "with": {"optimizer": {"rate": 1.0}}},
        "b": {
            "uses": "train.b",
            "inputs": {"model": ["data"]},
            "matrix": {"steps": [1, 2]},
            "resources": {"cpus": 1},
        },
        "c": {"uses": "broken", "with": {"anything": 1}},
    },
}


def test_it_is_a_schema_and_accepts_what_the_spec_accepts(schema: dict) -> None:
    import json

    assert schema["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(VALID, schema, jsonschema.Draft202012Validator)
    parse(read(json.dumps(VALID), "p.yaml"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("stagse",), {}),
        (("stages",), {}),
        (("stages", "1x"), {"uses": "broken"}),
        (("stages", "a", "uses"), "train.c"),
        (("stages", "a", "wiht"), {}),
        (("stages", "a", "inputs"), {}),
        (("stages", "a", "inputs", "modle"), "data"),
        (("stages", "a", "with", "stesp"), 1),
        (("stages", "a", "with", "steps"), "many"),
        (("stages", "a", "with", "optimizer", "rate"), "fast"),
        (("stages", "a", "with", "path"), "x"),
        (("stages", "b", "resources", "cpus"), 0),
    ],
)
def test_it_refuses_what_editors_should_underline(schema: dict, path: tuple[str, ...], value: object) -> None:
    data = copy.deepcopy(VALID)
    holder = data
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema, jsonschema.Draft202012Validator)


def test_definitions_of_plugins_do_not_collide(schema: dict) -> None:
    assert {"train.a:Optimizer", "train.b:Optimizer"} <= schema["$defs"].keys()
    assert "about train.a" in str(schema["$defs"]["StageSpec"]["properties"]["uses"])
