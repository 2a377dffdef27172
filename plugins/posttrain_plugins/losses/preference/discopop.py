"""The log-ratio modulated loss that a language model found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.loss import PreferenceBatch, State
from posttrain_plugins.losses.likelihood import logistic
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, margin
from posttrain_plugins.losses.preference.referenced import ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class DiscopopOptions(DivergenceOptions):
    """Options of the loss `discopop`."""

    discopop_tau: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="over how much of βΔ the loss goes from logistic to exponential; from 1 on it would be unbounded",
    )


class Discopop(ReferencedLoss):
    """L = (1 − m) · (−log σ(x)) + m · e^(−x) with x = β Δ and m = σ(x/τ).

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected), and τ is `discopop_tau`. Pairs that are the
    wrong way round have the logistic loss, the others an exponential one, which fades faster. Between them, near x
    = 0, it is not convex. At the start L = ½ ln 2 + ½ = 0.8466.

    When to use: an alternative to `sigmoid` that its authors found better on held-out tasks; with a small β.

    Reduction: mean over pairs.

    Source: Lu et al. 2024, eq. 5 (https://arxiv.org/abs/2406.08414).

    Example:
        x = 0.5 · 2 = 1 and m = σ(2) = 0.8808: 0.1192 · 0.3133 + 0.8808 · 0.3679 = 0.3614:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Discopop, {"beta": 0.5, "discopop_tau": 0.5}, chosen=[-1.0], rejected=[-3.0])
        0.3614
    """

    config = DiscopopOptions

    def values(self, batch: PreferenceBatch, config: DiscopopOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]; m · e^(−x) is one exponential, which cannot overflow."""
        from torch.nn.functional import logsigmoid

        scaled = config.beta * margin(batch, config)
        sharp = scaled / config.discopop_tau
        return (-sharp).sigmoid() * logistic(scaled) + (logsigmoid(sharp) - scaled).exp()
