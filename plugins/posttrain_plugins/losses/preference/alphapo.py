"""AlphaPO: SimPO with a reward of another shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from posttrain.contracts.loss import Family, Loss, LossOutput, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, MarginOptions, expm1_until, logistic, token_means, told

if TYPE_CHECKING:
    from torch import Tensor

STEEPEST = 40.0
"""Exponent from which on e^x goes on as its tangent, so that float32 holds it. With an α of 0.25 it is reached where
tokens have a mean log-prob of −160."""


class AlphaPoOptions(MarginOptions):
    """Options of the loss `alphapo`."""

    alpha: float = Field(
        default=0.25,
        ge=-10,
        le=10,
        description="shape of the reward: above 0 it is steeper for unlikely answers, below 0 flatter; not 0",
    )

    @field_validator("alpha")
    @classmethod
    def _shapes(cls, value: float) -> float:
        if value == 0:
            raise ValueError("alpha 0 is the logarithm: use the loss `simpo`")
        return value


class AlphaPo(Loss):
    """L = −log σ(β (r(c) − r(r)) − γ) with r(y) = (1 − p(y)^−α) / α.

    p(y) is the geometric mean of the probabilities of the tokens of an answer, so log p is SimPO's reward; with α → 0,
    r → log p. Options β and γ are those of `simpo`.

    When to use: SimPO whose chosen answers lose too much likelihood (raise α), or that hardly moves (lower it).

    Reduction: mean over pairs.

    Source: Gupta et al. 2025, section 3 (https://arxiv.org/abs/2501.03884).

    Example:
        With α = 1, p = e^(ln ½) gives r = 1 − 2 and p = ¼ gives 1 − 4; the difference is 2, so L = ln(1 + e^−2):

        >>> from math import log
        >>> from posttrain_plugins.testing.worked import worked
        >>> options = {"alpha": 1.0, "beta": 1.0, "gamma": 0.0}
        >>> worked(AlphaPo, options, chosen=[log(0.5)], rejected=[log(0.25)])
        0.1269
    """

    family = Family.PREFERENCE
    config = AlphaPoOptions
    metrics = TOLD

    def __call__(
        self, batch: PreferenceBatch, config: AlphaPoOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return a value for each pair, in nats."""
        chosen, rejected = (config.beta * _reward(each, config.alpha) for each in token_means(batch))
        values = logistic(chosen - rejected - config.margin, config.label_smoothing) * batch.weight
        return LossOutput([Term(values, EXAMPLE_MEAN)], told(batch, chosen, rejected))


def _reward(logp: Tensor, alpha: float) -> Tensor:
    """Return (1 − e^(−α log p)) / α of mean log-probs, shape [P]."""
    return -expm1_until(-alpha * logp, STEEPEST) / alpha
