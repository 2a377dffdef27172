"""Options: strict validation, component choices, marks, keys and the JSON Schema."""

from __future__ import annotations

import json
import pickle
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from helpers.plugins import catalogue_of, plugin
from pydantic import Field, model_validator

from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.loss import Family, Loss
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.stage import Secret, SecretMark, Source, SourceMark, StageConfig, VolatileMark
from posttrain.errors import PluginError, SpecError
from posttrain.registry.components import (
    ConfigProblem,
    ConfigProblems,
    choices,
    config_schema,
    marked,
    resolve,
    semantic,
    validate_config,
)
from posttrain.registry.discovery import discover
from posttrain.registry.options import describe

LossChoice = Annotated[Choice, Uses(Group.LOSS)]
RewardChoice = Annotated[Choice, Uses(Group.REWARD)]
Volatile = VolatileMark()


class SigmoidConfig(Config):
    beta: float = Field(default=0.1, description="strength of the pull to the reference")
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class Sigmoid(Loss):
    family = Family.PREFERENCE
    config = SigmoidConfig

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class Plain(Loss):
    family = Family.PREFERENCE

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class JudgeConfig(Config):
    rubric: Source
    token: Secret | None = None
    timeout: Annotated[int, Volatile] = 30
    scale: float = 1.0


class SumConfig(Config):
    parts: list[RewardChoice]


def reward(model: type[Config]) -> Any:
    def score(samples: Any, config: Any) -> list[float | None]:
        return []

    score.config = model
    return score


LOSSES = [
    Registration("sigmoid", "The DPO loss.", Sigmoid),
    Registration("acme/plain", "No options.", Plain),
]
REWARDS = [
    Registration("judge", "Asks a judge.", reward(JudgeConfig)),
    Registration("sum", "Adds rewards.", reward(SumConfig)),
]


@pytest.fixture
def catalogue():
    return catalogue_of(losses=LOSSES, rewards=REWARDS)


class Inner(Config):
    loss: LossChoice | None = None
    depth: int = 1


class Options(StageConfig):
    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate")
    steps: int | None = None
    loss: LossChoice = Field(default=Choice(name="sigmoid"), description="what is minimized")
    rewards: list[RewardChoice] = []
    named: dict[str, RewardChoice] = {}
    inner: Inner = Inner()


def problems_of(
    model: type[Config], data: dict[str, Any], catalogue: Any
) -> dict[tuple[Any, ...], ConfigProblem]:
    with pytest.raises(ConfigProblems) as error:
        validate_config(model, data, catalogue)
    paths = [problem.path for problem in error.value.problems]
    assert len(paths) == len(set(paths))
    return {problem.path: problem for problem in error.value.problems}


class Colour(StrEnum):
    RED = "red"


class Types(Config):
    real: float = 0.0
    whole: int = 0
    text: str = ""
    flag: bool = False
    pair: tuple[int, str] = (1, "")
    many: tuple[int, ...] = ()
    colour: Colour = Colour.RED
    path: Path = Path()
    mode: Literal["fast", "slow"] = "fast"
    either: str | list[str] = ""
    table: dict[str, float] = {}


@pytest.mark.parametrize(
    ("data", "name", "value"),
    [
        ({"real": 1}, "real", 1.0),
        ({"whole": 1}, "whole", 1),
        ({"text": "no"}, "text", "no"),
        ({"pair": [1, "a"]}, "pair", (1, "a")),
        ({"pair": (1, "a")}, "pair", (1, "a")),
        ({"many": [1, 2]}, "many", (1, 2)),
        ({"colour": "red"}, "colour", Colour.RED),
        ({"colour": Colour.RED}, "colour", Colour.RED),
        ({"path": "a/b"}, "path", Path("a/b")),
        ({"path": Path("a/b")}, "path", Path("a/b")),
        ({"either": ["a"]}, "either", ["a"]),
        ({"table": {"a": 1}}, "table", {"a": 1.0}),
    ],
)
def test_values_that_fit(data: dict[str, Any], name: str, value: Any, catalogue: Any) -> None:
    found = getattr(validate_config(Types, data, catalogue), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("data", "path", "found", "expected"),
    [
        ({"real": True}, ("real",), "true", "a valid number"),
        ({"real": "1e-3"}, ("real",), '"1e-3"', "a valid number"),
        ({"real": float("nan")}, ("real",), "NaN", "a finite number"),
        ({"real": float("inf")}, ("real",), "Infinity", "a finite number"),
        ({"whole": True}, ("whole",), "true", "a valid integer"),
        ({"whole": "3"}, ("whole",), '"3"', "a valid integer"),
        ({"whole": 3.0}, ("whole",), "3.0", "a valid integer"),
        ({"whole": None}, ("whole",), "null", "a valid integer"),
        ({"text": 10}, ("text",), "10", "a valid string"),
        ({"flag": 1}, ("flag",), "1", "a valid boolean"),
        ({"flag": "yes"}, ("flag",), '"yes"', "a valid boolean"),
        ({"many": [1, "2"]}, ("many", 1), '"2"', "a valid integer"),
        ({"colour": "blue"}, ("colour",), '"blue"', "'red'"),
        ({"mode": "quick"}, ("mode",), '"quick"', "'fast' or 'slow'"),
        ({"either": 1}, ("either",), "1", "a valid string or a list"),
        ({"either": [1]}, ("either", 0), "1", "a valid string"),
        ({"table": {"a": "b"}}, ("table", "a"), '"b"', "a valid number"),
    ],
)
def test_values_that_do_not_fit(
    data: dict[str, Any], path: tuple[Any, ...], found: str, expected: str, catalogue: Any
) -> None:
    problem = problems_of(Types, data, catalogue)[path]
    assert (problem.message, problem.found) == ("the value does not fit", found)
    assert problem.expected == expected


def test_a_value_without_a_json_form(catalogue: Any) -> None:
    assert "has no JSON form" in problems_of(Types, {"text": object()}, catalogue)[()].message


def test_an_unknown_option(catalogue: Any) -> None:
    problem = problems_of(Options, {"learning_rat": 1}, catalogue)[("learning_rat",)]
    assert problem.message == "there is no option 'learning_rat'"
    assert problem.suggestion == "did you mean `learning_rate`?"
    assert problem.expected == "one of learning_rate, steps, loss, rewards, named, inner"


def test_an_unknown_option_of_an_inner_config(catalogue: Any) -> None:
    problem = problems_of(Options, {"inner": {"dept": 1}}, catalogue)[("inner", "dept")]
    assert problem.suggestion == "did you mean `depth`?"


def test_a_bare_name_gets_all_options(catalogue: Any) -> None:
    loss = validate_config(Options, {"loss": "sigmoid"}, catalogue).loss
    assert (loss.name, loss.options) == ("sigmoid", {"beta": 0.1, "smoothing": 0.0})


def test_a_mapping_is_completed(catalogue: Any) -> None:
    loss = validate_config(Options, {"loss": {"name": "sigmoid", "beta": 1}}, catalogue).loss
    assert loss.options == {"beta": 1.0, "smoothing": 0.0}
    assert isinstance(loss.options["beta"], float)


def test_defaults_are_completed_everywhere(catalogue: Any) -> None:
    data = {
        "rewards": [{"name": "sum", "parts": [{"name": "judge", "rubric": "r.md"}]}],
        "named": {"a": {"name": "judge", "rubric": "r.md"}},
        "inner": {"loss": "plain"},
    }
    config = validate_config(Options, data, catalogue)
    judge = {"name": "judge", "rubric": "r.md", "token": None, "timeout": 30, "scale": 1.0}
    assert config.model_dump(mode="json") == {
        "learning_rate": 1e-5,
        "steps": None,
        "loss": {"name": "sigmoid", "beta": 0.1, "smoothing": 0.0},
        "rewards": [{"name": "sum", "parts": [judge]}],
        "named": {"a": judge},
        "inner": {"loss": {"name": "acme/plain"}, "depth": 1},
    }
    assert Options().loss.options == {}


def test_the_json_form_makes_the_same_config(catalogue: Any) -> None:
    config = validate_config(Options, {"rewards": [{"name": "judge", "rubric": "r.md"}]}, catalogue)
    dumped = json.loads(json.dumps(config.model_dump(mode="json")))
    again = validate_config(Options, dumped, catalogue)
    assert again == config
    assert validate_config(Options, {"rewards": config.rewards}, catalogue) == config


def test_problems_of_components_have_paths(catalogue: Any) -> None:
    data = {
        "loss": {"name": "sigmoid", "bta": 1, "smoothing": 0.7},
        "rewards": ["judge", {"name": "sum", "parts": [{"name": "judge", "rubric": 3}]}],
    }
    problems = problems_of(Options, data, catalogue)
    assert set(problems) == {
        ("loss", "bta"),
        ("loss", "smoothing"),
        ("rewards", 0, "rubric"),
        ("rewards", 1, "parts", 0, "rubric"),
    }
    assert problems["loss", "bta"].suggestion == "did you mean `beta`?"
    assert problems["loss", "smoothing"].expected == "less than 0.5"
    assert problems["rewards", 0, "rubric"].message == "the option 'rubric' is required"


def test_problems_of_options_and_of_components_come_together(catalogue: Any) -> None:
    data = {
        "learning_rate": 0,
        "loss": {"name": "sigmoid", "beta": "x"},
        "inner": {"loss": "nonsense", "x": 1},
    }
    assert set(problems_of(Options, data, catalogue)) == {
        ("learning_rate",),
        ("loss", "beta"),
        ("inner", "x"),
        ("inner", "loss"),
    }


def test_an_unknown_component(catalogue: Any) -> None:
    problem = problems_of(Options, {"loss": "sigmod"}, catalogue)[("loss",)]
    assert (problem.message, problem.suggestion) == ("there is no loss 'sigmod'", "did you mean `sigmoid`?")
    assert set(problems_of(Options, {"loss": {"name": "sigmod"}}, catalogue)) == {("loss", "name")}


@pytest.mark.parametrize("value", [3, ["sigmoid"], None])
def test_what_is_no_choice_at_all(value: Any, catalogue: Any) -> None:
    problem = problems_of(Options, {"loss": value}, catalogue)[("loss",)]
    if value is not None:
        assert problem.expected == "the name of a loss, or a mapping with `name` and its options"


def test_an_option_of_the_default_component_is_pointed_there(catalogue: Any) -> None:
    problem = problems_of(Options, {"beta": 0.2}, catalogue)[("beta",)]
    assert problem.suggestion == "it is an option of `loss`: write `loss: {name: sigmoid, beta: …}`"


def test_options_alone_mean_the_default_component(catalogue: Any) -> None:
    config = validate_config(Options, {"loss": {"beta": 0.2}}, catalogue)
    assert config.loss.name == "sigmoid" and config.loss.options["beta"] == 0.2


def test_a_choice_without_a_default_needs_a_name(catalogue: Any) -> None:
    assert set(problems_of(Options, {"rewards": [{"rubric": "r.md"}]}, catalogue)) == {("rewards", 0, "name")}
    assert set(problems_of(Options, {"loss": {"name": 3}}, catalogue)) == {("loss", "name")}


def test_a_broken_component_is_a_problem_at_its_place() -> None:
    items = [Registration("x", "s", "no_such_module:Loss")]
    problem = problems_of(Options, {"loss": "x"}, catalogue_of(losses=items))[("loss",)]
    assert "the loss 'x' of memory cannot be imported: ModuleNotFoundError" in problem.message


def test_secrets_are_never_shown(catalogue: Any) -> None:
    data = {"rewards": [{"name": "judge", "rubric": "r.md", "token": "hunter2"}]}
    problem = problems_of(Options, data, catalogue)[("rewards", 0, "token")]
    assert problem.found == "a literal value"
    assert problem.expected == "env:NAME, the environment variable that holds the secret"
    assert "hunter2" not in str(problem)


def test_a_models_own_check(catalogue: Any) -> None:
    class Checked(Config):
        low: int = 0
        high: int = 1

        @model_validator(mode="after")
        def _ordered(self) -> Checked:
            if self.low > self.high:
                raise ValueError("low is above high")
            return self

    problem = problems_of(Checked, {"low": 2}, catalogue)[()]
    assert (problem.message, problem.found) == ("low is above high", None)


def test_the_problems_are_one_error_that_survives_pickling(catalogue: Any) -> None:
    with pytest.raises(SpecError) as error:
        validate_config(Options, {"x": 1, "loss": "sigmod"}, catalogue)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.problems == error.value.problems
    assert str(again) == str(error.value)
    assert "x: there is no option 'x', found x" in str(error.value)
    assert "loss: there is no loss 'sigmod'" in str(error.value)


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
