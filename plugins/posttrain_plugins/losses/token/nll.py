"""Negative log-likelihood of the supervised tokens."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, State, Stats, Term, TokenBatch
from posttrain.contracts.reduction import TOKEN_MEAN


class Nll(Loss):
    """L = −(1/N) Σ_t w · log π(y_t | x, y_<t), over the N supervised tokens of the whole optimizer step.

    The mean is taken over tokens, so a long answer weighs more than a short one, and no split of the step
    changes it.

    When to use: demonstrations to be learned as they are; the plain choice for supervised fine-tuning.

    Source: Ouyang et al. 2022, section 3.5 (https://arxiv.org/abs/2203.02155).

    Example:
        One answer whose two tokens have the probabilities 1/2 and 1/4: (ln 2 + ln 4) / 2

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Nll, logp=[-0.6931, -1.3863], example=[0, 0])
        1.0397
    """

    family = Family.TOKEN
    metrics = frozenset({"token_accuracy", "entropy"})

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each supervised token, in nats."""
        values = -batch.logp * batch.weight
        return LossOutput(
            terms=[Term(values, TOKEN_MEAN)],
            metrics={"token_accuracy": batch.top1.to(batch.entropy.dtype), "entropy": batch.entropy.detach()},
        )
