"""Negative log-likelihood of the chosen answers."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import RoleTokenMean
from posttrain_plugins.losses.likelihood import LIKELIHOODS, likelihoods


class Sft(Loss):
    """L = −Σ log π(chosen) / tokens of all chosen answers of the step.

    It needs no reference. Rejected answers do not count.

    When to use: as one loss of several: beside a loss that looks at differences alone, it keeps the likelihood of
    chosen answers from falling.

    Reduction: mean over the tokens of the chosen answers of the whole step.

    Source: Pang et al. 2024 (https://arxiv.org/abs/2404.19733) and, in a mixture, Wang et al. 2024 (MPO,
    https://arxiv.org/abs/2411.10442).

    Example:
        (3 + 5) nats over 2 + 6 tokens:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Sft, chosen=[-3.0, -5.0], rejected=[-1.0, -1.0], chosen_tokens=[2, 6])
        1.0
    """

    family = Family.PREFERENCE
    metrics = LIKELIHOODS

    def __call__(self, batch: PreferenceBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each pair, in nats."""
        term = Term(-batch.chosen * batch.weight, RoleTokenMean("chosen"))
        return LossOutput([term], likelihoods(batch))
