"""The likelihood of a ranking of several answers."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, Need, RewardBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.reward.metrics import DIAGNOSTICS, diagnostics


class PlackettLuce(Loss):
    """L = Σᵢ [ log(exp rᵢ + Σ_{j worse than i} exp rⱼ) − rᵢ ], averaged over prompts.

    i runs over the answers to a prompt that are better than some other one: the best is drawn from all, the second
    best from what is left, and so on. Answers with equal scores are not contrasted with each other.

    When to use: prompts with several ranked answers: each is contrasted with all worse ones at once, while
    `bradley_terry` looks at two at a time. For two answers both are the same.

    Reduction: the mean over examples. Plackett 1975 (https://doi.org/10.2307/2346567); for reward models with several
    answers: Zhu et al. 2023, eq. 10 (https://arxiv.org/abs/2301.11270). A row's `margin` is not used.

    Example:
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(PlackettLuce, reward=[0.0, 0.0, 0.0], score=[3.0, 2.0, 1.0], example=[0, 0, 0])  # ln 3 + ln 2
        1.7918
        >>> worked(PlackettLuce, reward=[2.0, 1.0])  # −log σ(1)
        0.3133
    """

    family = Family.REWARD
    needs = frozenset({Need.RIVALS})
    metrics = DIAGNOSTICS

    def __call__(self, batch: RewardBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each prompt, in nats."""
        import torch

        better, worse = batch.pairs
        count = len(batch.reward)
        drawn = torch.eye(count, dtype=torch.bool, device=batch.reward.device)
        drawn[better, worse] = True
        rivals = batch.reward.expand(count, count).masked_fill(~drawn, -torch.inf)
        # Of an answer that is better than none this is exactly 0, and so is its gradient.
        values = rivals.logsumexp(1) - batch.reward
        by_example = values.new_zeros(len(batch.weight)).index_add(0, batch.example, values)
        return LossOutput(terms=[Term(by_example * batch.weight, EXAMPLE_MEAN)], metrics=diagnostics(batch))
