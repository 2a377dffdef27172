"""Divergences from the reference: how log-ratios become the scores whose difference a loss looks at.

DPO keeps the policy near its reference in reverse KL divergence, and its score is the log-ratio r = log π/π_ref. For
D_f = E_ref[f(π/π_ref)] the score is f′(e^r) (Wang et al. 2023, https://arxiv.org/abs/2309.16240), up to a constant
that cancels in the difference of two answers to one prompt. Losses that look at one answer alone have no such form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from posttrain.contracts.loss import PreferenceBatch
from posttrain_plugins.losses.likelihood import expm1_until
from posttrain_plugins.losses.preference.referenced import BetaOptions, SmoothedOptions, log_ratios

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
STEEPEST = 30.0
"""Where e^x goes on as its tangent: what is beyond it would overflow when it is squared."""


class DivergenceOptions(BetaOptions):
    """Options of losses that look at the difference of two scores."""

    f_divergence_type: Divergence = Field(
        default="reverse_kl",
        description="the divergence that keeps the policy near its reference, which sets the scores of answers",
    )
    f_alpha_divergence_coef: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="α of `alpha_divergence`: near 0 as forward_kl, near 1 as reverse_kl",
    )

    @model_validator(mode="after")
    def _alpha(self) -> Self:
        default = type(self).model_fields["f_alpha_divergence_coef"].default
        if self.f_divergence_type != "alpha_divergence" and self.f_alpha_divergence_coef != default:
            raise ValueError(f"f_alpha_divergence_coef would be ignored by {self.f_divergence_type}")
        return self


class SmoothedDivergenceOptions(SmoothedOptions, DivergenceOptions):
    """The same, for losses that can take some preferences to be wrong."""


def scores(batch: PreferenceBatch, config: DivergenceOptions) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen and of the rejected answers, shape [P] each; 0 where π = π_ref."""
    scored = _SCORES[config.f_divergence_type]
    chosen, rejected = log_ratios(batch)
    return scored(chosen, config.f_alpha_divergence_coef), scored(rejected, config.f_alpha_divergence_coef)


def margin(batch: PreferenceBatch, config: DivergenceOptions) -> Tensor:
    """Return Δ, the difference of the two scores, shape [P]."""
    chosen, rejected = scores(batch, config)
    return chosen - rejected


def mean_margin(batch: PreferenceBatch, config: DivergenceOptions) -> Tensor:
    """Return the difference of the scores a token, shape [P]."""
    chosen, rejected = scores(batch, config)
    return chosen / batch.chosen_tokens - rejected / batch.rejected_tokens


def _reverse_kl(ratio: Tensor, alpha: float) -> Tensor:
    return ratio


def _forward_kl(ratio: Tensor, alpha: float) -> Tensor:
    return -expm1_until(-ratio, STEEPEST)


def _js(ratio: Tensor, alpha: float) -> Tensor:
    from torch.nn.functional import logsigmoid

    return math.log(2) + logsigmoid(ratio)


def _alpha(ratio: Tensor, alpha: float) -> Tensor:
    return expm1_until((alpha - 1) * ratio, STEEPEST) / (alpha - 1)


_SCORES: Mapping[Divergence, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js_divergence": _js,
    "alpha_divergence": _alpha,
}
