"""What every loss over rewards tells: how often the better answer gets more, and how large rewards are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import RewardBatch

if TYPE_CHECKING:
    from torch import Tensor


DIAGNOSTICS = frozenset({"accuracy", "rewards/margin", "rewards/chosen", "rewards/rejected", "rewards/mean"})
"""The metrics that `diagnostics` returns."""


def diagnostics(batch: RewardBatch) -> dict[str, Tensor]:
    """Return the metrics of a batch, detached; those of pairs are left out where no answer is better than another."""
    reward = batch.reward.detach()
    better, worse = batch.pairs
    margin = reward[better] - reward[worse]
    return {
        "accuracy": (margin > 0).to(reward.dtype),
        "rewards/margin": margin,
        "rewards/chosen": reward[better],
        "rewards/rejected": reward[worse],
        "rewards/mean": reward,
    }


def mean_by_example(values: Tensor, example: Tensor, batch: RewardBatch) -> Tensor:
    """Average values over those that belong to each example: shape [any] to [E]; 0 where there are none."""
    zeros = values.new_zeros(len(batch.weight))
    counts = zeros.index_add(0, example, values.detach().new_ones(len(values)))
    return zeros.index_add(0, example, values) / counts.clamp(min=1)
