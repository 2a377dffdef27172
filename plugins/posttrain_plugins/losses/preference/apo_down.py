"""Anchored preference optimization for a policy that is better than the chosen answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss, log_ratios

if TYPE_CHECKING:
    from torch import Tensor


class ApoDown(ReferencedLoss):
    """L = σ(s_c) + 1 − σ(s_c − s_r).

    s_c = β log π(chosen)/π_ref(chosen) and s_r the same of the rejected answer. The likelihoods of both fall, that
    of the rejected answer further. At the start L = 1.

    When to use: where even the chosen answers are worse than what the policy says by itself; where they are better,
    use `apo_zero`.

    Reduction: mean over pairs.

    Source: D'Oosterlinck et al. 2024, eq. 8 (https://arxiv.org/abs/2408.06266).

    Example:
        s_c = 0 and s_r = 0.5 · (−2) = −1: 0.5 + (1 − 0.7311) = 0.7689:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(ApoDown, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0],
        ...        reference_chosen=[-1.0], reference_rejected=[-1.0])
        0.7689
    """

    def values(self, batch: PreferenceBatch, config: BetaOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        chosen, rejected = (config.beta * ratio for ratio in log_ratios(batch))
        return chosen.sigmoid() + (rejected - chosen).sigmoid()
