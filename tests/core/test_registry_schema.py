"""What is read from validated options: marks, what belongs in a key, components, a JSON schema."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from helpers.component_options import (
    LOSSES,
    REWARDS,
    Inner,
    Options,
    RewardChoice,
    Sigmoid,
    SigmoidConfig,
    Types,
    Volatile,
)
from helpers.plugins import catalogue_of, plugin
from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.stage import Secret, SecretMark, Source, SourceMark, StageConfig, VolatileMark
from posttrain.errors import PluginError
from posttrain.registry.components import (
    ConfigProblems,
    choices,
    config_schema,
    marked,
    resolve,
    semantic,
    validate_config,
)
from posttrain.registry.discovery import discover
from posttrain.registry.fields import type_name
from posttrain.registry.options import describe


@pytest.fixture
def catalogue():
    return catalogue_of(losses=LOSSES, rewards=REWARDS)


class Marked(StageConfig):
    data: Source
    optional: Source | None = None
    files: list[Source] = []
    choice: Literal["builtin"] | Source = "builtin"
    token: Secret | None = None
    log_every: Annotated[int, Volatile] = 10
    rewards: list[RewardChoice] = []
    seed: int = 0


def test_marks_are_found_in_components_too(catalogue: Any) -> None:
    data = {
        "data": "a.jsonl",
        "files": ["b", "c"],
        "token": "env:TOKEN",
        "rewards": [{"name": "sum", "parts": [{"name": "judge", "rubric": "r.md", "token": "env:KEY"}]}],
    }
    config = validate_config(Marked, data, catalogue)
    inner = ("rewards", 0, "parts", 0)
    assert list(marked(config, SourceMark)) == [
        (("data",), "a.jsonl"),
        (("files", 0), "b"),
        (("files", 1), "c"),
        ((*inner, "rubric"), "r.md"),
    ]
    assert list(marked(config, SecretMark)) == [(("token",), "env:TOKEN"), ((*inner, "token"), "env:KEY")]
    assert list(marked(config, VolatileMark)) == [(("log_every",), 10), ((*inner, "timeout"), 30)]
    assert [(path, choice.name, group) for path, choice, group in choices(config)] == [
        (("rewards", 0), "sum", Group.REWARD),
        (inner, "judge", Group.REWARD),
    ]


def test_semantic_options(catalogue: Any) -> None:
    data = {
        "data": "a",
        "files": ["b"],
        "token": "env:T",
        "log_every": 5,
        "rewards": [{"name": "judge", "rubric": "r"}],
    }
    assert semantic(validate_config(Marked, data, catalogue)) == {
        "files": [],
        "choice": "builtin",
        "rewards": [{"name": "judge", "scale": 1.0}],
        "seed": 0,
    }


def test_what_cannot_change_outputs_does_not_change_semantic_options(catalogue: Any) -> None:
    one = validate_config(Marked, {"data": "a", "log_every": 1}, catalogue)
    two = validate_config(Marked, {"data": "b", "log_every": 2}, catalogue)
    three = validate_config(Marked, {"data": "b", "seed": 1}, catalogue)
    assert semantic(one) == semantic(two) != semantic(three)


def test_a_union_takes_its_first_fitting_arm(catalogue: Any) -> None:
    assert list(marked(validate_config(Marked, {"data": "a", "choice": "f"}, catalogue), SourceMark))[1] == (
        ("choice",),
        "f",
    )


def test_semantic_refuses_choices_that_were_not_validated() -> None:
    with pytest.raises(ValueError, match="were not validated against a catalogue"):
        semantic(Options())


def test_resolve(catalogue: Any) -> None:
    component = resolve(Choice(name="sigmoid", beta=0.5), Group.LOSS, catalogue)
    assert isinstance(component.plugin, Sigmoid)
    assert component.config == SigmoidConfig(beta=0.5)
    assert resolve(Choice(name="plain"), Group.LOSS, catalogue).name == "acme/plain"
    with pytest.raises(ConfigProblems):
        resolve(Choice(name="sigmoid", beta="x"), Group.LOSS, catalogue)
    with pytest.raises(PluginError):
        resolve(Choice(name="nothing"), Group.LOSS, catalogue)


SCHEMA_CASES = [
    {},
    {"loss": "sigmoid"},
    {"loss": {"name": "sigmoid", "beta": 1}},
    {"loss": "plain"},
    {"loss": {"name": "acme/plain"}},
    {"inner": {"loss": None}},
    {"inner": {"loss": "sigmoid"}},
    {"rewards": [{"name": "judge", "rubric": "r.md"}]},
    {"rewards": [{"name": "sum", "parts": [{"name": "sum", "parts": []}]}]},
    {"named": {"a": {"name": "judge", "rubric": "r.md", "token": "env:X"}}},
    {"loss": "sigmod"},
    {"loss": {"name": "sigmoid", "bta": 1}},
    {"loss": {"name": "sigmoid", "beta": "1"}},
    {"loss": {"beta": 1}},
    {"rewards": ["judge"]},
    {"rewards": [{"name": "judge", "rubric": "r.md", "token": "literal"}]},
    {"rewards": [{"name": "sum", "parts": ["nothing"]}]},
    {"inner": {"loss": {"name": "acme/plain", "x": 1}}},
]


@pytest.mark.parametrize("data", SCHEMA_CASES, ids=str)
def test_the_schema_agrees_with_validation(data: dict[str, Any], catalogue: Any) -> None:
    schema = config_schema(Options, catalogue)
    jsonschema.Draft202012Validator.check_schema(schema)
    try:
        validate_config(Options, data, catalogue)
        valid = True
    except ConfigProblems:
        valid = False
    assert jsonschema.Draft202012Validator(schema).is_valid(data) is valid


def test_the_schema_keeps_descriptions_and_defaults(catalogue: Any) -> None:
    schema = config_schema(Options, catalogue)
    assert schema["properties"]["learning_rate"]["description"] == "peak learning rate"
    loss = schema["properties"]["loss"]
    assert loss["description"] == "what is minimized"
    assert loss["default"] == {"name": "sigmoid"}
    assert loss["anyOf"] == [{"$ref": "#/$defs/uses.loss"}, {"$ref": "#/$defs/default.loss.sigmoid"}]
    plain, plain_mapping, sigmoid, sigmoid_mapping = schema["$defs"]["uses.loss"]["oneOf"]
    assert sigmoid == {"const": "sigmoid", "description": "The DPO loss."}
    assert plain == {"enum": ["acme/plain", "plain"], "description": "No options."}
    assert plain_mapping["additionalProperties"] is False
    beta = sigmoid_mapping["properties"]["beta"]
    assert (beta["description"], beta["default"]) == ("strength of the pull to the reference", 0.1)
    assert "Choice" not in schema["$defs"]


def test_the_schema_leaves_out_what_cannot_be_used() -> None:
    broken = plugin("broken", losses=[Registration("broken", "s", "no_such_module:Loss")])
    catalogue = discover(extra=[plugin("good", losses=LOSSES), broken], installed=False)
    names = [each.get("const") for each in config_schema(Inner, catalogue)["$defs"]["uses.loss"]["oneOf"]]
    assert "sigmoid" in names and "broken" not in names


def test_a_schema_without_components_has_no_definitions(catalogue: Any) -> None:
    assert "$defs" not in config_schema(SigmoidConfig, catalogue)


def test_described_options() -> None:
    options = {option["name"]: option for option in describe(Options)}
    assert {name: option["type"] for name, option in options.items()} == {
        "learning_rate": "float",
        "steps": "int | null",
        "loss": "loss",
        "rewards": "list[reward]",
        "named": "dict[str, reward]",
        "inner": "Inner",
    }
    assert options["loss"]["default"] == {"name": "sigmoid"}
    assert options["learning_rate"]["description"] == "peak learning rate"
    types = {option["name"]: option["type"] for option in describe(Types)}
    assert (
        types["mode"] == "'fast' | 'slow'"
        and types["colour"] == "'red'"
        and types["pair"] == "tuple[int, str]"
    )
    assert types["many"] == "tuple[int, ...]"
    data, *_, log_every, _, _ = describe(Marked)
    assert (data["required"], data["traits"], log_every["traits"]) == (
        True,
        ["local file"],
        ["not in the key"],
    )


class OneOrSeveral(Config):
    loss: Annotated[Choice | Annotated[list[Choice], Field(min_length=1)], Uses(Group.LOSS)] = Choice(
        name="sigmoid"
    )
    other: Annotated[Choice | None, Uses(Group.LOSS)] = None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, None),
        ({"loss": "acme/plain"}, None),
        ({"loss": {"beta": 0.2}}, None),
        ({"loss": ["acme/plain", {"name": "sigmoid", "beta": 0.2}], "other": "sigmoid"}, None),
        ({"loss": []}, "loss: the value does not fit"),
        ({"loss": ["nothing"]}, "loss.0: "),
        ({"loss": [{"beta": 0.2}]}, "loss.0.name: the option 'name' is required"),
        ({"loss": ["sigmoid", {"name": "sigmoid", "gamma": 1}]}, "loss.1.gamma: there is no option 'gamma'"),
    ],
)
def test_a_field_may_take_one_component_or_several(
    data: dict[str, Any], problem: str | None, catalogue: Any
) -> None:
    schema = config_schema(OneOrSeveral, catalogue)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(data) is (problem is None)
    if problem is None:
        config = validate_config(OneOrSeveral, data, catalogue)
        assert validate_config(OneOrSeveral, json.loads(config.model_dump_json()), catalogue) == config
        return
    with pytest.raises(ConfigProblems) as refused:
        validate_config(OneOrSeveral, data, catalogue)
    (found,) = refused.value.problems
    assert str(found).startswith(problem)


def test_several_components_are_found_and_shown_one_by_one(catalogue: Any) -> None:
    config = validate_config(OneOrSeveral, {"loss": ["sigmoid", "acme/plain"]}, catalogue)
    assert [(path, choice.name) for path, choice, _ in choices(config)] == [
        (("loss", 0), "sigmoid"),
        (("loss", 1), "acme/plain"),
    ]
    assert semantic(config)["loss"] == [
        {"name": "sigmoid", "beta": 0.1, "smoothing": 0.0},
        {"name": "acme/plain"},
    ]
    assert [each["type"] for each in describe(OneOrSeveral)] == ["loss | list[loss]", "loss | null"]


def test_literals_are_shown_as_they_are_written() -> None:
    shown = type_name(Literal[Kind.MODEL, Kind.REWARD_MODEL, "other", 3])
    assert shown == "'model' | 'reward-model' | 'other' | 3"
