"""Squared error of rewards against given scores."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, RewardBatch, State, Stats, Term
from posttrain.contracts.reduction import SEQUENCE_MEAN
from posttrain_plugins.losses.reward.metrics import DIAGNOSTICS, diagnostics


class Regression(Loss):
    """L = (r − s)², averaged over answers.

    r is the reward of an answer and s its score. Scores of the size of 1 learn best, since the loss grows with their
    square. Rows of preferences are scored 1 for the better answer and 0 for the worse one.

    When to use: where the data says how good an answer is and not only which is better: ratings of helpfulness, shares
    of tests that pass, fitted ratings.

    Reduction: the mean over sequences. As in Wang et al. 2023 (https://arxiv.org/abs/2311.09528). A row's `margin` is
    not used.

    Example:
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Regression, reward=[2.0, 1.0], score=[1.5, 1.0], example=[0, 1])  # (0.25 + 0) / 2
        0.125
    """

    family = Family.REWARD
    metrics = DIAGNOSTICS | {"rewards/error"}

    def __call__(self, batch: RewardBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each answer."""
        error = batch.reward - batch.score
        values = error.square() * batch.weight[batch.example]
        metrics = {**diagnostics(batch), "rewards/error": error.detach().abs()}
        return LossOutput(terms=[Term(values, SEQUENCE_MEAN)], metrics=metrics)
