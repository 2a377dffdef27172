"""The reward contract: score completions.

A reward plugin is a function `(samples, config) -> list[float | None]`; `None` abstains. It is never silently 0.
One that judges with a model is a `ModelReward`: the model is an input of the stage that uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.stage import Finding, Input, StageContext


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


Scorer = Callable[[Sequence[Sample]], list[float | None]]
"""One score for each sample, or None to abstain."""


class Reward(Protocol):
    """Registered under `Group.REWARD` as a class with these attributes."""

    config: ClassVar[type[Config]] = NoOptions

    def __call__(self, samples: Sequence[Sample], config: Any) -> list[float | None]:
        """Return one score for each sample, or None to abstain."""


class ModelReward(ABC):
    """Base of rewards that judge with a model. Registered under `Group.REWARD` as a class, made without arguments.

    The stage that uses it has the model on an input port; the plan refuses a pipeline that connects none, or one of
    another kind.

    Class attributes:
        config: Its options.
        models: The kinds of model that it judges with.
    """

    config: ClassVar[type[Config]] = NoOptions
    models: ClassVar[frozenset[Kind]]

    def check(self, model: Input, config: Any) -> Iterable[Finding]:
        """Report what is wrong with these options on this model, of one of `models`."""
        return ()

    @abstractmethod
    def open(self, model: Artifact, context: StageContext, config: Any) -> Scorer:
        """Open the model in the worker and return what scores with it."""
