"""The squared loss of identity preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, mean_margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class IpoOptions(DivergenceOptions):
    """Options of the loss `ipo`."""

    beta: float = Field(
        default=0.1, gt=0, description="τ of the paper: the margin aimed at is 1/(2β) a token"
    )


class Ipo(ReferencedLoss):
    """L = (h − 1/(2β))².

    h = log(π/π_ref)(chosen) / tokens of chosen − log(π/π_ref)(rejected) / tokens of rejected: log-ratios are
    averaged over the tokens of each answer, so that the margin 1/(2β) means the same for long and short ones. At
    the start h = 0 and L = 1/(4β²).

    When to use: where preferences are nearly deterministic and DPO would push margins without end: here a margin
    can be too large.

    Reduction: mean over pairs.

    Source: Azar et al. 2023, eq. 17 (https://arxiv.org/abs/2310.12036), with log-ratios by token.

    Example:
        1/(2β) = 2. With rejected answers of 2 and 3 tokens h = −1 + 6/2 = 2 and h = −1 + 6/3 = 1:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Ipo, {"beta": 0.25}, chosen=[-1.0], rejected=[-6.0], rejected_tokens=[2])
        0.0
        >>> worked(Ipo, {"beta": 0.25}, chosen=[-1.0], rejected=[-6.0], rejected_tokens=[3])
        1.0
    """

    config = IpoOptions

    def values(self, batch: PreferenceBatch, config: IpoOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        return (mean_margin(batch, config) - 1 / (2 * config.beta)) ** 2
