"""The cross-entropy of labels of steps."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, ProcessRewardBatch, State, Stats, Term
from posttrain.contracts.reduction import TOKEN_MEAN
from posttrain_plugins.losses.process_reward.metrics import DIAGNOSTICS, diagnostics


class StepCrossEntropy(Loss):
    """L = −y log σ(z) − (1 − y) log σ(−z).

    z are the log-odds that the answer is right up to the end of a step, y its label: 1 right, 0 wrong, or the
    probability that it is right, such as the share of continuations from there that reached the right result. A label
    in between is learned as it is; L is least at σ(z) = y, where it is the entropy of y.

    When to use: for every process reward model; labels by people are hard, labels by Monte Carlo roll-outs are soft.
    With hard labels it is the cross-entropy of two classes z₀ and z₁, where z = z₁ − z₀.

    Reduction: mean over the steps of the optimizer step; an answer of many steps counts more than one of few.

    Source: Lightman et al. 2023, section 2.4 (https://arxiv.org/abs/2305.20050); soft labels: Wang et al. 2024, eq. 3
    and 4 (https://arxiv.org/abs/2312.08935).

    Example:
        A step of even odds, and one of odds 3 to 1 (z = ln 3 = 1.0986): ln 2 = 0.6931 and −ln 0.75 = 0.2877, in the
        mean 0.4904. A label of 0.75 costs −0.75 ln 0.75 − 0.25 ln 0.25 = 0.5623 there:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(StepCrossEntropy, logit=[0.0, 1.0986], label=[0.0, 1.0])
        0.4904
        >>> worked(StepCrossEntropy, logit=[1.0986], label=[0.75])
        0.5623
    """

    family = Family.PROCESS_REWARD
    metrics = DIAGNOSTICS

    def __call__(
        self, batch: ProcessRewardBatch, config: NoOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return one term with a value for each step, in nats."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        values = binary_cross_entropy_with_logits(batch.logit, batch.label, reduction="none")
        return LossOutput([Term(values * batch.weight, TOKEN_MEAN)], diagnostics(batch))
