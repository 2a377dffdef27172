"""Alignment by optimal transport: chosen above rejected as distributions, whatever belongs together."""

from __future__ import annotations

from posttrain.contracts.loss import LossOutput, PreferenceBatch, Scope, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, logistic
from posttrain_plugins.losses.preference.metrics import rewards
from posttrain_plugins.losses.preference.referenced import ReferencedLoss, SmoothedOptions, log_ratios
from posttrain_plugins.losses.preference.transport import coupling


class AotUnpaired(ReferencedLoss):
    """L = −(1−ε) log σ(β d_i) − ε log σ(−β d_i).

    d_i = the i-th smallest log π/π_ref of the chosen answers of the step − the i-th smallest of the rejected ones:
    the rewards of chosen answers shall be larger as a distribution, not each than that of its own rival. The whole
    optimizer step is sorted, on all ranks, however it is cut. A row of weight 2 counts as two rows. At the start d
    = 0 and L = ln 2.

    When to use: where a good answer should be good whatever it is compared with, as with answers rated one by one.

    Reduction: mean over i.

    Source: Melnyk et al. 2024 (https://arxiv.org/abs/2406.05882), for unpaired data.

    Example:
        Log-ratios are −1 and −2 of the chosen and −3 and −2 of the rejected answers: d = (−2 + 3, −1 + 2) = (1, 1), and
        ln(1 + e⁻¹) = 0.3133; pair by pair it would be (2, 0):

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(AotUnpaired, {"beta": 1.0}, chosen=[-1.0, -2.0], rejected=[-3.0, -2.0])
        0.3133
    """

    config = SmoothedOptions
    scope = Scope.STEP
    metrics = TOLD

    def __call__(
        self, batch: PreferenceBatch, config: SmoothedOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return one term with a value for each pair, in nats; the weights of rows are in what is matched."""
        chosen, rejected = log_ratios(batch)
        found = coupling(chosen, rejected, batch.weight)
        scaled = config.beta * (chosen[found.left] - rejected[found.right])
        values = found.to_left(logistic(scaled, config.label_smoothing))
        return LossOutput([Term(values, EXAMPLE_MEAN)], rewards(batch, config.beta))
