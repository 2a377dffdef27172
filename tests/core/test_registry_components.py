"""Options: strict validation, component choices, marks, keys and the JSON Schema."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from helpers.component_options import (
    LOSSES,
    REWARDS,
    Colour,
    Options,
    Types,
)
from helpers.plugins import catalogue_of
from pydantic import model_validator

from posttrain.contracts.component import Config
from posttrain.contracts.registration import Registration
from posttrain.errors import SpecError
from posttrain.registry.components import (
    ConfigProblem,
    ConfigProblems,
    validate_config,
)


@pytest.fixture
def catalogue():
    return catalogue_of(losses=LOSSES, rewards=REWARDS)


def problems_of(
    model: type[Config], data: dict[str, Any], catalogue: Any
) -> dict[tuple[Any, ...], ConfigProblem]:
    with pytest.raises(ConfigProblems) as error:
        validate_config(model, data, catalogue)
    paths = [problem.path for problem in error.value.problems]
    assert len(paths) == len(set(paths))
    return {problem.path: problem for problem in error.value.problems}


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
