"""The contract of callbacks as the registry checks it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from posttrain import Callback, Config
from posttrain.contracts.registration import Group
from posttrain.registry.validation import faults


class Options(Config):
    name: str = Field(default="", description="taken")


class Sound(Callback):
    target = "acme:made"


def changed(**attributes: Any) -> type[Callback]:
    return type("Changed", (Sound,), attributes)


def test_a_sound_callback_has_no_faults() -> None:
    assert list(faults(Group.CALLBACK, Sound)) == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (object(), "must be a subclass of posttrain.Callback"),
        (changed(target="acme"), "`target` must be 'module:function'"),
        (changed(watches_only="yes"), "`watches_only` must be true or false"),
        (changed(config=Options), "an option cannot be called 'name'"),
        (changed(ports=lambda self: ()), "ports must take (config)"),
        (changed(problems=lambda self, config: ()), "problems must take (config, training)"),
        (changed(__init__=lambda self, needed: None), "the constructor must take ()"),
    ],
)
def test_what_breaks_the_contract_is_told(target: Any, expected: str) -> None:
    assert any(expected in fault for fault in faults(Group.CALLBACK, target))
