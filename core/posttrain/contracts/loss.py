"""The loss contract: a pure function from a family's batch to unreduced terms.

`values` are 1-D and unreduced, one per token, per sequence or per example. The loop reduces once, over the whole
optimizer step, all its micro-batches and all ranks, as the term's `reduction` says. So no loss sees padding,
accumulation, packing or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.contracts.batches import (
    AnswerTokens,
    Family,
    PreferenceBatch,
    ProcessRewardBatch,
    RewardBatch,
    ThreeWayBatch,
    TokenBatch,
    UnpairedBatch,
)
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.needs import REFERENCES, Absent, Need, Undeclared, held
from posttrain.contracts.reduction import Reduction

if TYPE_CHECKING:
    from torch import Tensor


__all__ = [
    "REFERENCES",
    "Absent",
    "AnswerTokens",
    "Family",
    "Loss",
    "LossOutput",
    "Need",
    "PreferenceBatch",
    "ProcessRewardBatch",
    "RewardBatch",
    "Scope",
    "State",
    "Stats",
    "Term",
    "ThreeWayBatch",
    "TokenBatch",
    "Undeclared",
    "UnpairedBatch",
    "held",
]


class Scope(StrEnum):
    """What one call of a loss sees.

    MICRO_BATCH: any part of the step; each value depends on its own example (and on `stats` and `state`).
    STEP: all of the step on all ranks, for losses whose values mix examples (a sort, a ranking). It costs a
    second forward pass, and is exact for every cut.
    """

    MICRO_BATCH = "micro_batch"
    STEP = "step"


@dataclass(frozen=True)
class Term:
    """One additive part of a loss.

    Args:
        values: Unreduced, shape [tokens], [sequences] or [examples] as the reduction takes it, in nats.
        reduction: How the loop reduces them.
        weight: A number for the whole term. Row weights multiply the values only.
    """

    values: Tensor
    reduction: Reduction
    weight: float = 1.0


@dataclass(frozen=True)
class LossOutput:
    """The terms of a loss and its diagnostics.

    Each metric is a detached tensor of unreduced values, shape [any]; the loop averages it over the step and
    all ranks, leaving out what is not finite, and leaves a metric without any value out of the log.
    """

    terms: Sequence[Term]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


Stats = Mapping[str, "Tensor"]
"""Sums over the whole step and all ranks, float64, without gradient."""
State = Mapping[str, Any]
"""A small JSON object, the same on every rank, kept in checkpoints."""


class Loss:
    """Base of every loss. Registered under `Group.LOSS` as a class; instantiated without arguments.

    Most losses define `__call__` alone. One that depends on the step as a whole, such as an estimate over the
    batch, declares it in `measure`; one that remembers something from step to step also defines `begin` and
    `advance`. In each step the loop calls, in this order: `measure` on every micro-batch (its sums make
    `stats`), `advance` once, then the loss itself with the new state.

    Class attributes:
        family: Which batch it takes.
        config: Its options.
        needs: What its batch must hold beside log-probs, whatever its options.
        scope: What one call sees.
        metrics: The names of all metrics it tells, so that an option that names another one is refused before anything
            runs; None where that is not said. A subclass that overrides `__call__`, or anything that is neither
            abstract nor of `Loss`, says it anew.
        needs_reference: Whether it compares with a reference, whatever its options; follows from `needs`.
    """

    config: ClassVar[type[Config]] = NoOptions
    # A loss that is made of others has these from its parts: each instance its own.
    family: Family
    needs: frozenset[Need] = frozenset()
    scope: Scope = Scope.MICRO_BATCH
    metrics: frozenset[str] | None = None
    needs_reference: bool = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.needs_reference = bool(cls.needs & REFERENCES)
        if cls._tells_otherwise():
            cls.metrics = None

    @classmethod
    def _tells_otherwise(cls) -> bool:
        """Whether something that may tell metrics is another than where they were declared."""
        declaring = next(each for each in cls.__mro__ if "metrics" in each.__dict__)
        nearer = cls.__mro__[: cls.__mro__.index(declaring)]
        return any(
            name == "__call__" or _overrides(declaring, name) for each in nearer for name in each.__dict__
        )

    def __call__(self, batch: Any, config: Any, stats: Stats, state: State) -> LossOutput:
        """Return the unreduced terms."""
        raise TypeError(f"{type(self).__name__} defines no __call__(batch, config, stats, state)")

    def measure(self, batch: Any, config: Any, state: State) -> Mapping[str, Tensor]:
        """Return additive quantities of a part of the step, each of a fixed shape; called without gradient.

        The part holds at least one example.
        """
        return {}

    def begin(self, config: Any) -> State:
        """Return the state before the first step."""
        return {}

    def advance(self, state: State, stats: Stats, config: Any) -> State:
        """Return the state of this step, given that of the last one and the sums over this one."""
        return state

    def needs_of(self, config: Any) -> frozenset[Need]:
        """Return what its batch must hold with these options; `needs`, unless that depends on them."""
        return self.needs

    @property
    def measures(self) -> bool:
        """Whether it defines `measure`."""
        return type(self).measure is not Loss.measure


def _overrides(base: type[Loss], name: str) -> bool:
    """Whether an attribute of this name replaces one of the base's own, and does not only fill a gap in it."""
    if name.startswith("__") or hasattr(Loss, name) or not hasattr(base, name):
        return False
    return not getattr(getattr(base, name), "__isabstractmethod__", False)
