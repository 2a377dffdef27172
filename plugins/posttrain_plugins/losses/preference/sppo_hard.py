"""Self-play preference optimization with certain preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss, log_ratios

if TYPE_CHECKING:
    from torch import Tensor


class SppoHardOptions(BetaOptions):
    """Options of the loss `sppo_hard`."""

    beta: float = Field(
        default=0.1, gt=0, description="1/η of the paper: the log-ratios aimed at are ±1/(2β)"
    )


class SppoHard(ReferencedLoss):
    """L = (r_c − 1/(2β))² + (r_r + 1/(2β))².

    r_c = log π(chosen)/π_ref(chosen) and r_r the same of the rejected answer. The paper aims at η (P − ½) with the
    probability P that an answer wins; here P is 1 for the chosen and 0 for the rejected one, and β = 1/η. At the
    start L = 1/(2β²).

    When to use: where answers are the policy's own and one round follows another. It controls both likelihoods, not
    their difference alone. Log-ratios are of whole answers, so a small β means large steps.

    Reduction: mean over pairs.

    Source: Wu et al. 2024, eq. 4.7 (https://arxiv.org/abs/2405.00675).

    Example:
        1/(2β) = 1, r_c = 2 and r_r = 0: 1 + 1 = 2:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(SppoHard, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0],
        ...        reference_chosen=[-3.0], reference_rejected=[-3.0])
        2.0
    """

    config = SppoHardOptions

    def values(self, batch: PreferenceBatch, config: SppoHardOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        chosen, rejected = log_ratios(batch)
        aim = 0.5 / config.beta
        return (chosen - aim) ** 2 + (rejected + aim) ** 2
