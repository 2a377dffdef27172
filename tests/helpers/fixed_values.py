"""A loss of fixed values, so that reductions can be worked out by hand."""

from __future__ import annotations

from typing import Any

from posttrain.contracts.loss import Family, Loss, LossOutput, Term, TokenBatch
from posttrain.contracts.reduction import (
    EXAMPLE_MEAN,
    Reduction,
)
from posttrain.contracts.trainer import Example, TokenSequence


class Values(Loss):
    """Fixed values by token, so that the reduction can be worked out by hand."""

    family = Family.TOKEN

    def __init__(self, reduction: Reduction, weight: float = 1.0) -> None:
        self.reduction, self.weight = reduction, weight

    def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
        values = batch.logp * 0 + batch.example.new_tensor([1.0, 3.0, 6.0])[: len(batch.logp)]
        if self.reduction is EXAMPLE_MEAN:
            values = values.new_zeros(len(batch.weight.unique())).index_add(0, batch.example, values)
        return LossOutput([Term(values, self.reduction, self.weight)], {"value": values.detach()})


def two_rows() -> list[Example]:
    """Two supervised tokens and one: losses 1 and 3, and 6 when they are in one micro-batch."""
    return [
        Example(0, (TokenSequence([4, 5, 6], [False, True, True], "completion"),)),
        Example(1, (TokenSequence([4, 7], [False, True], "completion"),), weight=2.0),
    ]
