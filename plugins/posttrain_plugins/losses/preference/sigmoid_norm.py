"""The logistic loss on log-ratios averaged over the tokens of each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.likelihood import logistic
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, mean_margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class SigmoidNormOptions(DivergenceOptions):
    """Options of the loss `sigmoid_norm`."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="strength of the pull to the reference policy; log-ratios are by token, so 2 to 10 is usual",
    )


class SigmoidNorm(ReferencedLoss):
    """L = −log σ(β h).

    h = log(π/π_ref)(chosen) / tokens of chosen − log(π/π_ref)(rejected) / tokens of rejected. At the start h = 0
    and L = ln 2.

    When to use: where chosen answers are longer than rejected ones and DPO would learn length. As h is smaller than
    DPO's Δ by about the number of tokens, β has to be larger.

    Reduction: mean over pairs.

    Source: Lambert et al. 2024 (Tülu 3, https://arxiv.org/abs/2411.15124), length-normalized DPO.

    Example:
        h = −2/2 + 8/4 = 1, and ln(1 + e⁻¹) = 0.3133:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(SigmoidNorm, {"beta": 1.0}, chosen=[-2.0], rejected=[-8.0], chosen_tokens=[2], rejected_tokens=[4])
        0.3133
    """

    config = SigmoidNormOptions

    def values(self, batch: PreferenceBatch, config: SigmoidNormOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        return logistic(config.beta * mean_margin(batch, config))
