"""The logistic loss made unbiased under preferences that are the wrong way round at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.likelihood import logistic
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class RobustOptions(DivergenceOptions):
    """Options of the loss `robust`."""

    label_smoothing: float = Field(
        default=0.1,
        gt=0,
        lt=0.5,
        description="known share of pairs whose preference is the wrong way round; with 0 it would be `sigmoid`",
    )


class Robust(ReferencedLoss):
    """L = ((1−ε) ℓ(β Δ) − ε ℓ(−β Δ)) / (1 − 2ε) with ℓ(x) = −log σ(x).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), and ε is `label_smoothing`. Over preferences
    of which a share ε was swapped at random, its mean is that of `sigmoid` over the right ones. At the start L = ln
    2.

    When to use: where labels are known to be noisy and how often they are wrong is known too. It is not bounded
    from below: single values may be negative, and large margins are not slowed down as by `sigmoid` with label
    smoothing.

    Reduction: mean over pairs.

    Source: Chowdhury et al. 2024 (https://arxiv.org/abs/2403.00409).

    Example:
        βΔ = 0.2, ε = 0.1: (0.9 · 0.59814 − 0.1 · 0.79814) / 0.8 = 0.57314:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Robust, {"beta": 0.1, "label_smoothing": 0.1}, chosen=[-1.0], rejected=[-3.0])
        0.5731
    """

    config = RobustOptions

    def values(self, batch: PreferenceBatch, config: RobustOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        scaled, wrong = config.beta * margin(batch, config), config.label_smoothing
        return ((1 - wrong) * logistic(scaled) - wrong * logistic(-scaled)) / (1 - 2 * wrong)
