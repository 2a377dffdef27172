"""The reward contract: score completions.

A reward plugin is a function `(samples, config) -> list[float | None]`; `None` abstains. It is never silently 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from posttrain.contracts.component import Config, NoOptions


@dataclass(frozen=True)
class Sample:
    """One completion to score.

    Args:
        prompt: The conversation so far, as messages.
        completion: The text of the completion.
        row: The dataset row the prompt came from, with the reference answer and any other column.
        finished: Whether the policy ended its turn (false: cut off by the length limit).
    """

    prompt: Sequence[Mapping[str, Any]]
    completion: str
    row: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True


class Reward(Protocol):
    """Registered under `Group.REWARD` as a class with these attributes."""

    config: ClassVar[type[Config]] = NoOptions

    def __call__(self, samples: Sequence[Sample], config: Any) -> list[float | None]:
        """Return one score for each sample, or None to abstain."""
