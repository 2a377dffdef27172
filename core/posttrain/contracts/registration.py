"""A registration: the light announcement of one plugin."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Group(StrEnum):
    """The extension points."""

    STAGE = "stage"
    TRAINER = "trainer"
    LOSS = "loss"
    BACKEND = "backend"
    CALLBACK = "callback"
    FORMAT = "format"
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
        requires: Libraries that are not always installed and without which it cannot be used. What is used unasked,
            such as the default runner and trackers, is left out where one is missing.
    """

    name: str
    summary: str
    target: Any
    numerics: int = 1
    reference: str | None = None
    requires: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether everything it requires is installed; imports none of it."""
        return all(importlib.util.find_spec(library) is not None for library in self.requires)

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
