"""The loss of Kahneman-Tversky optimization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.contracts.loss import Family, Loss, LossOutput, Need, State, Stats, Term, UnpairedBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.unpaired.metrics import DIAGNOSTICS, diagnostics
from posttrain_plugins.losses.unpaired.options import SidedOptions

if TYPE_CHECKING:
    from torch import Tensor


class Kto(Loss):
    """L = λ_D σ(−β (r − z)) for good answers, λ_U σ(−β (z − r)) for bad ones, averaged over answers.

    r = log π(y|x)/π_ref(y|x); λ_D and λ_U are `desirable_weight` and `undesirable_weight`.
    z = max(0, mean of log π(y'|x)/π_ref(y'|x)) estimates the KL divergence from the reference, over the answers y' of
    other rows to the prompts x of the whole step; it has no gradient. Which answer y' a row is given comes from the
    dataset, so neither the batch size nor the order matters, and a step may hold one answer, or good ones alone. Where
    no row has another answer, z = 0.

    When to use: where answers are judged one by one and not in pairs, or good and bad ones are not equally many: weigh
    the sides such that λ_D · (good answers) is about as much as λ_U · (bad answers), or a little more.

    Source: Ethayarajh et al. 2024, eq. 7 (https://arxiv.org/abs/2402.01306); λ_y − v(x, y) there.

    Example:
        Two answers, one good and one bad, both with log π/π_ref = 2, and z = max(0, (1 + 3)/2) = 2, so that both are
        at σ(0) = 1/2:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Kto, logp=[-1.0, -1.0], reference=[-3.0, -3.0], desirable=[True, False],
        ...        mismatched=[-4.0, -2.0], reference_mismatched=[-5.0, -5.0])
        0.5
    """

    family = Family.UNPAIRED
    config = SidedOptions
    needs = frozenset({Need.REFERENCE, Need.MISMATCHED})
    metrics = DIAGNOSTICS | {"kl"}

    def measure(self, batch: UnpairedBatch, config: SidedOptions, state: State) -> Mapping[str, Tensor]:
        """Sum log π/π_ref of the answers of other rows, and count them."""
        ratio = (batch.mismatched - batch.reference_mismatched).double()
        known = ~ratio.isnan()
        return {"kl": ratio[known].sum(), "mismatched": known.sum()}

    def __call__(self, batch: UnpairedBatch, config: SidedOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each answer."""
        z = divergence(stats, batch.logp)
        sign = 2 * batch.desirable.to(batch.logp) - 1
        values = (-config.beta * sign * (batch.log_ratio - z)).sigmoid()
        metrics = diagnostics(batch, config.beta * batch.log_ratio, config.beta * z)
        return LossOutput(
            terms=[Term(config.side(batch) * values * batch.weight, EXAMPLE_MEAN)],
            metrics={**metrics, "kl": z.expand(len(values))},
        )


def divergence(stats: Stats, like: Tensor) -> Tensor:
    """Return z, a scalar of the same type as a tensor; 0 where no row has another row's answer."""
    if "kl" not in stats:
        return like.new_zeros(())
    return (stats["kl"] / stats["mismatched"].clamp(min=1)).clamp(min=0).to(like)
