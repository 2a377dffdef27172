"""Exploratory preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import Need, PreferenceBatch, State, held
from posttrain_plugins.losses.likelihood import logistic, widened
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class XpoOptions(BetaOptions):
    """Options of the loss `xpo`."""

    alpha: float = Field(
        default=1e-5,
        gt=0,
        description="weight of the exploration: how much the reference's answers are made unlikely",
    )


class Xpo(ReferencedLoss):
    """L = −log σ(βΔ) + α log π(y_ref).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), and y_ref is that answer of the pair which the
    reference wrote, better or not; the policy wrote the other one. The column `chosen_by` tells: `policy` or
    `reference`. The second term is optimism: what the reference says anyway is made less likely, so that the policy
    goes where nobody has looked. It has no lower bound, so α stays small.

    When to use: in rounds, on pairs of an answer of the policy as it is and one of the reference, judged anew.

    Reduction: mean over pairs.

    Source: Xie et al. 2024, algorithm 1 (https://arxiv.org/abs/2405.21046).

    Example:
        βΔ = 0.5 · 2 = 1: −log σ(1) = 0.3133. The reference wrote the rejected answer: 0.1 · (−3); or the chosen one:
        0.1 · (−1):

        >>> from posttrain_plugins.testing.worked import worked
        >>> pair = {"chosen": [-1.0], "rejected": [-3.0]}
        >>> worked(Xpo, {"beta": 0.5, "alpha": 0.1}, **pair, own=[True])
        0.0133
        >>> worked(Xpo, {"beta": 0.5, "alpha": 0.1}, **pair, own=[False])
        0.2133
    """

    config = XpoOptions
    needs = frozenset({Need.REFERENCE, Need.AUTHORS})

    def values(self, batch: PreferenceBatch, config: XpoOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        own = held(batch.own, Need.AUTHORS, "own")
        of_reference = batch.rejected.where(own, batch.chosen)
        return logistic(config.beta * widened(batch.margin)) + config.alpha * widened(of_reference)
