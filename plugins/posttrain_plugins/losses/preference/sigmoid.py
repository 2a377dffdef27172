"""The logistic loss of direct preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.likelihood import logistic
from posttrain_plugins.losses.preference.divergence import SmoothedDivergenceOptions, margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class SigmoidOptions(SmoothedDivergenceOptions):
    """Options of the loss `sigmoid`."""


class Sigmoid(ReferencedLoss):
    """L = −(1−ε) log σ(β Δ) − ε log σ(−β Δ).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), β is `beta` and ε is `label_smoothing`. At
    the start, where the policy is its own reference, Δ = 0 and L = ln 2.

    When to use: the plain choice for preference pairs. With ε > 0, the conservative form, it stops pushing at σ(β
    Δ) = 1 − ε, for preferences that are sometimes the wrong way round.

    Reduction: mean over pairs.

    Source: Rafailov et al. 2023, eq. 7 (https://arxiv.org/abs/2305.18290); ε > 0: Mitchell 2023
    (https://ericmitchell.ai/cdpo.pdf).

    Example:
        βΔ = 0.5 · (−1 + 3) = 1, and ln(1 + e⁻¹) = 0.3133:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Sigmoid, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0])
        0.3133
    """

    config = SigmoidOptions

    def values(self, batch: PreferenceBatch, config: SigmoidOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        return logistic(config.beta * margin(batch, config), config.label_smoothing)
