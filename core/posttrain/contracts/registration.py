"""A registration: the light announcement of one plugin."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Group(StrEnum):
    """The extension points."""

    STAGE = "stage"
    TRAINER = "trainer"
    LOSS = "loss"
    REWARD = "reward"
    GENERATOR = "generator"
    RULE = "rule"
    RUNNER = "runner"
    TRACKER = "tracker"
    COMMAND = "command"
    RECIPE = "recipe"


@dataclass(frozen=True)
class Registration:
    """Announces one plugin without importing it.

    Args:
        name: The id users write, such as `train.sft` or `acme/simpo2`.
        summary: One line for `plugins list`.
        target: `module:attribute` of the light plugin object or class (see the group's contract); for a recipe, a path.
            A plugin in a local file may give the object itself.
        numerics: Raise it when the same inputs and options give other outputs than before; it is part of the key.
        reference: The paper or equation it implements, if any.
    """

    name: str
    summary: str
    target: Any
    numerics: int = 1
    reference: str | None = None

    def load(self) -> Any:
        """Import and return the target."""
        return load_target(self.target) if isinstance(self.target, str) else self.target


def load_target(target: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
