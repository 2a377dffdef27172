"""The conformance suite over every registered loss: a new one is covered when it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from posttrain.contracts.registration import Group
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain.registry.discovery import discover
from posttrain_plugins.testing.losses.conformance import CHECKS
from posttrain_plugins.testing.losses.subject import LossSubject, loss_subject

MONOTONE: Mapping[str, str | None] = {"apo_down": "worse"}
"""In which direction a loss does not rise, where that is not its whole margin."""
EXCEPT: Mapping[str, Mapping[str, str]] = {
    "bco": {"absence": "δ is the mean reward of all answers that training sees, whatever they weigh"},
    "dft": {"gradcheck": "its weights are the policy's own probabilities, and have no gradient"},
    "discopop": {"monotone": "the paper's loss has a local minimum near a margin of zero"},
    "ipo": {"monotone": "the margin is pulled to a target, from above too"},
    "nash_md": {
        "gradcheck": "its weights are log-ratios of the policy itself, and have no gradient",
        "monotone": "an answer that is less likely preferred than not is made unlikely, chosen or not",
    },
    "kto": {"absence": "z is estimated from the other rows' answers of all rows, whatever these weigh"},
    "regression": {"monotone": "the number is pulled to a score, from above too"},
    "sppo_hard": {"monotone": "each log-ratio is pulled to a target, from above too"},
}
"""Checks that a loss is known not to pass, with the reason."""


@cache
def subject(name: str) -> LossSubject:
    return loss_subject(name, monotone=MONOTONE.get(name, "margin"))


def cases() -> Iterator[Any]:
    for name in discover().names(Group.LOSS):
        for check in CHECKS:
            reason = EXCEPT.get(name, {}).get(check)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(name, check, marks=marks, id=f"{name}-{check}")


@pytest.mark.parametrize(("name", "check"), list(cases()))
def test_a_registered_loss_conforms(name: str, check: str) -> None:
    CHECKS[check](subject(name))


WITH_OPTIONS = tuple(name for name in CHECKS if name not in ("contract", "effects", "monotone", "example"))
"""What must hold whatever the options are."""


def others(field: FieldInfo) -> list[Any]:
    """Values of an option that change what is computed: other names; 0, or something where 0 is the default; much."""
    if get_origin(field.annotation) is Literal:
        return [each for each in get_args(field.annotation) if each != field.default]
    return [] if field.default is None else [0.3] if field.default == 0 else [0.0, 5.0]


def variants() -> Iterator[Any]:
    """Yield every loss with each of its options changed in turn, as far as that validates."""
    catalogue = discover()
    for name in catalogue.names(Group.LOSS):
        model = catalogue.load(Group.LOSS, name).config
        for option, field in model.model_fields.items():
            for value in others(field):
                with suppress(ConfigProblems):
                    validate_config(model, {option: value}, catalogue)
                    yield pytest.param(name, {option: value}, id=f"{name}-{option}={value}")


@pytest.mark.parametrize(("name", "options"), list(variants()))
def test_a_registered_loss_conforms_with_other_options(name: str, options: Mapping[str, Any]) -> None:
    changed = loss_subject(name, options)
    for check in WITH_OPTIONS:
        if check not in EXCEPT.get(name, {}):
            CHECKS[check](changed)


def test_there_are_options_to_change() -> None:
    assert len(list(variants())) > 30
