"""Efficient exact optimization on pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class ExoPairOptions(DivergenceOptions):
    """Options of the loss `exo_pair`."""

    label_smoothing: float = Field(
        default=1e-3,
        gt=0,
        lt=0.5,
        description="probability that the data gives to the rejected answer; the target has none without it",
    )


class ExoPair(ReferencedLoss):
    """L = q log(q/(1−ε)) + (1−q) log((1−q)/ε) with q = σ(β Δ).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), and ε is `label_smoothing`: the divergence
    KL(q ‖ p) of the policy's preference from the data's p = (1−ε, ε), where DPO takes KL(p ‖ q). At the start q = ½
    and L = −½ log(4 ε (1−ε)). It is least, 0, at σ(β Δ) = 1 − ε, and its slope fades where the policy is surely
    wrong.

    When to use: where a mode-seeking policy is wanted: it settles on some good answers instead of covering all of
    them.

    Reduction: mean over pairs.

    Source: Ji et al. 2024, eq. 16 (https://arxiv.org/abs/2402.00856).

    Example:
        q = ½, ε = 0.1: ½ ln(0.5/0.9) + ½ ln(0.5/0.1) = −½ ln 0.36 = 0.5108:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(ExoPair, {"label_smoothing": 0.1}, chosen=[-2.0], rejected=[-2.0])
        0.5108
    """

    config = ExoPairOptions

    def values(self, batch: PreferenceBatch, config: ExoPairOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        from torch.nn.functional import logsigmoid

        scaled = config.beta * margin(batch, config)
        better = scaled.sigmoid() * (logsigmoid(scaled) - math.log1p(-config.label_smoothing))
        worse = (-scaled).sigmoid() * (logsigmoid(-scaled) - math.log(config.label_smoothing))
        return better + worse
