"""The hinge loss on the margin of implicit rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class Hinge(ReferencedLoss):
    """L = max(0, 1 − β Δ).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), and β is `beta`, the reciprocal of the
    margin: a pair with Δ ≥ 1/β is learned no further. At the start Δ = 0 and L = 1.

    When to use: where pairs that are clearly told apart should be left alone; its slope does not fade before that.

    Reduction: mean over pairs.

    Source: Zhao et al. 2023 (SLiC-HF, https://arxiv.org/abs/2305.10425), on log-ratios as in Liu et al. 2023 (RSO,
    https://arxiv.org/abs/2309.06657).

    Example:
        βΔ is 0.25 · 2 for the first pair and 0.25 · 8 for the second; (0.5 + 0) / 2 = 0.25:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Hinge, {"beta": 0.25}, chosen=[-1.0, -1.0], rejected=[-3.0, -9.0])
        0.25
    """

    config = DivergenceOptions

    def values(self, batch: PreferenceBatch, config: DivergenceOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        return (1 - config.beta * margin(batch, config)).relu()
