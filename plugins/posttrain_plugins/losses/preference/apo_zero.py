"""Anchored preference optimization for a policy that is worse than the chosen answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss, log_ratios

if TYPE_CHECKING:
    from torch import Tensor


class ApoZero(ReferencedLoss):
    """L = 1 − σ(s_c) + σ(s_r).

    s_c = β log π(chosen)/π_ref(chosen) and s_r the same of the rejected answer. The likelihood of chosen answers
    rises and that of rejected ones falls, each for itself. At the start L = 1.

    When to use: where the chosen answers are better than what the policy says by itself; where they are worse, use
    `apo_down`.

    Reduction: mean over pairs.

    Source: D'Oosterlinck et al. 2024, eq. 7 (https://arxiv.org/abs/2408.06266).

    Example:
        s_c = 0.5 · 2 = 1, s_r = 0: (1 − 0.7311) + 0.5 = 0.7689:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(ApoZero, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0],
        ...        reference_chosen=[-3.0], reference_rejected=[-3.0])
        0.7689
    """

    def values(self, batch: PreferenceBatch, config: BetaOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        chosen, rejected = (config.beta * ratio for ratio in log_ratios(batch))
        return (-chosen).sigmoid() + rejected.sigmoid()
