"""The focal loss."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, State, Stats, Term, TokenBatch
from posttrain.contracts.reduction import TOKEN_MEAN

SMALLEST = 1e-30
"""Stands in for 1 − p of a certain token, where the slope of a power below 1 would be infinite."""


class FocalOptions(Config):
    """Options of the loss `focal`."""

    gamma: float = Field(
        default=2.0, gt=0, le=20, description="how little tokens count that the policy knows already"
    )


class Focal(Loss):
    """L = −(1/N) Σ_t w · (1 − p_t)^γ log p_t with p_t = π(y_t | x, y_<t), over the N supervised tokens of the step.

    Gradients flow through both factors. Tokens that are nearly certain count for next to nothing, so the model
    changes by those that it has not learned; the opposite of `dft`.

    When to use: long, mostly predictable texts, and policies that are to stay less certain of themselves. Values
    cannot be compared with those of `nll`.

    Reduction: mean over supervised tokens.

    Source: Lin et al. 2017, eq. 4 (https://arxiv.org/abs/1708.02002), of tokens instead of boxes.

    Example:
        (½² ln 2 + (¾)² ln 4) / 2 with γ = 2:

        >>> from math import log
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Focal, {"gamma": 2.0}, logp=[log(0.5), log(0.25)])
        0.4765
    """

    family = Family.TOKEN
    config = FocalOptions
    metrics = frozenset({"token_accuracy", "entropy", "focal/factor"})

    def __call__(self, batch: TokenBatch, config: FocalOptions, stats: Stats, state: State) -> LossOutput:
        """Return a value for each supervised token, in nats."""
        unknown = (-batch.logp.expm1()).clamp(min=SMALLEST) ** config.gamma
        return LossOutput(
            [Term(-unknown * batch.logp * batch.weight, TOKEN_MEAN)],
            {
                "token_accuracy": batch.top1.to(batch.entropy.dtype),
                "entropy": batch.entropy.detach(),
                "focal/factor": unknown.detach(),
            },
        )
