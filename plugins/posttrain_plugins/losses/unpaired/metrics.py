"""Diagnostics that losses over good and bad answers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import UnpairedBatch

if TYPE_CHECKING:
    from torch import Tensor


DIAGNOSTICS = frozenset(
    {"rewards/accuracy", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"}
)
"""The metrics that `diagnostics` returns."""


def diagnostics(batch: UnpairedBatch, rewards: Tensor, threshold: Tensor | float) -> dict[str, Tensor]:
    """Return rewards and log-probs by side, and whether rewards tell good answers from bad ones.

    A side without an answer has no values, so the log leaves it out.

    Args:
        batch: The answers.
        rewards: β log π/π_ref of each, shape [U].
        threshold: The reward from which on the loss takes an answer for a good one.
    """
    rewards, logp, good = rewards.detach(), batch.logp.detach(), batch.desirable
    return {
        "rewards/accuracy": ((rewards > threshold) == good).to(rewards.dtype),
        "rewards/chosen": rewards[good],
        "rewards/rejected": rewards[~good],
        "logps/chosen": logp[good],
        "logps/rejected": logp[~good],
    }
