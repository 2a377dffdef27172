"""Noise contrastive alignment on pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss, log_ratios

if TYPE_CHECKING:
    from torch import Tensor


class NcaPair(ReferencedLoss):
    """L = −log σ(s_c) − ½ log σ(−s_c) − ½ log σ(−s_r).

    s_c = β log π(chosen)/π_ref(chosen) and s_r the same of the rejected answer: implicit rewards, each for itself.
    At the start both are 0 and L = 2 ln 2.

    When to use: where DPO lowers the likelihood of chosen answers too: what is absolute in a reward counts here, so
    that of chosen answers rises (to s_c = ln 2 where nothing else holds it).

    Reduction: mean over pairs.

    Source: Chen et al. 2024 (https://arxiv.org/abs/2402.05369), with two answers to each prompt.

    Example:
        s_c = 0.5 · 2 = 1, s_r = 0.5 · (−2) = −1: 0.3133 + ½ · 1.3133 + ½ · 0.3133 = 1.1265:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(NcaPair, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0],
        ...        reference_chosen=[-3.0], reference_rejected=[-1.0])
        1.1265
    """

    def values(self, batch: PreferenceBatch, config: BetaOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        from torch.nn.functional import logsigmoid

        chosen, rejected = (config.beta * ratio for ratio in log_ratios(batch))
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
