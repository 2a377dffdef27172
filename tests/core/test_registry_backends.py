"""What a backend must be like to be used."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.contracts.backend import Backend, Ranks
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.registration import Group
from posttrain.registry.validation import faults


class Good(Backend):
    target = "somewhere:Parallel"


class Aimless(Backend):
    config = NoOptions


class Named(Backend):
    target = "somewhere:Parallel"

    class config(Config):
        name: str = "taken"


def test_a_sound_backend_has_no_faults():
    assert list(faults(Group.BACKEND, Good)) == []
    assert Good().ranks(Ranks()) == 2 and Good().problems(Ranks(), None) == ()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Good(), "subclass of posttrain.Backend"),
        (Aimless, "`target` must be"),
        (Named, "cannot be called 'name'"),
    ],
)
def test_what_is_wrong_is_said(target: Any, expected: str):
    assert expected in "; ".join(faults(Group.BACKEND, target))
