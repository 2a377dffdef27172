"""Alignment by optimal transport: chosen above rejected as distributions, for pairs."""

from __future__ import annotations

from posttrain.contracts.loss import LossOutput, PreferenceBatch, Scope, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, logistic
from posttrain_plugins.losses.preference.metrics import rewards
from posttrain_plugins.losses.preference.referenced import ReferencedLoss, SmoothedOptions
from posttrain_plugins.losses.preference.transport import coupling


class Aot(ReferencedLoss):
    """L = −(1−ε) log σ(β d_i) − ε log σ(−β d_i).

    d_i = the i-th smallest log π(chosen)/π(rejected) of the step − the i-th smallest log
    π_ref(chosen)/π_ref(rejected): the policy's margins shall be larger than its reference's as a distribution
    (first-order stochastic dominance), not pair by pair. The whole optimizer step is sorted, on all ranks, however
    it is cut. A row of weight 2 counts as two rows. At the start d = 0 and L = ln 2.

    When to use: where some pairs are hard and may stay behind, as long as the margins as a whole rise. It wants
    large steps.

    Reduction: mean over i.

    Source: Melnyk et al. 2024 (https://arxiv.org/abs/2406.05882), for paired data.

    Example:
        Margins are 1 and 4 under the policy and 3 and 0 under the reference: d = (1 − 0, 4 − 3) = (1, 1), and
        ln(1 + e⁻¹) = 0.3133; pair by pair it would be (−2, 4):

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Aot, {"beta": 1.0}, chosen=[-1.0, -1.0], rejected=[-2.0, -5.0],
        ...        reference_chosen=[-1.0, -1.0], reference_rejected=[-4.0, -1.0])
        0.3133
    """

    config = SmoothedOptions
    scope = Scope.STEP
    metrics = TOLD

    def __call__(
        self, batch: PreferenceBatch, config: SmoothedOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return one term with a value for each pair, in nats; the weights of rows are in what is matched."""
        margins = batch.chosen - batch.rejected
        reference = batch.reference_chosen - batch.reference_rejected
        found = coupling(margins, reference, batch.weight)
        scaled = config.beta * (margins[found.left] - reference[found.right])
        values = found.to_left(logistic(scaled, config.label_smoothing))
        return LossOutput([Term(values, EXAMPLE_MEAN)], rewards(batch, config.beta))
