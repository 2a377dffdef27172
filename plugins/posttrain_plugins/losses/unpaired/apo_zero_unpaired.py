"""Anchored preference optimization that pushes good answers up and bad ones down."""

from __future__ import annotations

from posttrain.contracts.loss import Family, Loss, LossOutput, Need, State, Stats, Term, UnpairedBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.unpaired.metrics import DIAGNOSTICS, diagnostics
from posttrain_plugins.losses.unpaired.options import SidedOptions


class ApoZeroUnpaired(Loss):
    """L = λ_D σ(−β r) for good answers, λ_U σ(β r) for bad ones, averaged over answers; r = log π(y|x)/π_ref(y|x).

    Good answers become more likely than under the reference and bad ones less, each by itself; that is KTO's loss with
    z = 0, so no answers of other rows are scored. λ_D and λ_U are `desirable_weight` and `undesirable_weight`.

    When to use: where the good answers are better than what the policy says by itself.

    Source: D'Oosterlinck et al. 2024, eq. 7, answer by answer (https://arxiv.org/abs/2408.06266).

    Example:
        A good answer with β r = ln 3 and a bad one with β r = 0: (1/4 + 1/2) / 2

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(ApoZeroUnpaired, {"beta": 1.0}, logp=[1.0986123, 0.0], desirable=[True, False])
        0.375
    """

    family = Family.UNPAIRED
    config = SidedOptions
    needs = frozenset({Need.REFERENCE})
    metrics = DIAGNOSTICS

    def __call__(self, batch: UnpairedBatch, config: SidedOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each answer."""
        rewards = config.beta * batch.log_ratio
        sign = 2 * batch.desirable.to(batch.logp) - 1
        values = (-sign * rewards).sigmoid()
        return LossOutput(
            terms=[Term(config.side(batch) * values * batch.weight, EXAMPLE_MEAN)],
            metrics=diagnostics(batch, rewards, 0.0),
        )
