"""Cross-entropy with smoothed labels."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, Need, State, Stats, Term, TokenBatch
from posttrain.contracts.reduction import TOKEN_MEAN


class LabelSmoothingOptions(Config):
    """Options of the loss `label_smoothing`."""

    epsilon: float = Field(
        default=0.1, gt=0, lt=1, description="share of each label that is spread over the vocabulary"
    )


class LabelSmoothing(Loss):
    """L = −(1/N) Σ_t w · ((1−ε) log π(y_t | x, y_<t) + (ε/V) Σ_v log π(v | x, y_<t)).

    N counts the supervised tokens of the step, V the model's logits: every token of the vocabulary gets ε/V of the
    label. No probability can be 0, so certainty has a price, and the lowest loss is not 0.

    When to use: many demonstrations with wrong or arbitrary tokens, and policies that shall not become too certain.

    Reduction: mean over supervised tokens.

    Source: Szegedy et al. 2015, section 7 (https://arxiv.org/abs/1512.00567).

    Example:
        Over two tokens with p = ¾ and ¼, the label is 0.9 · ln ¾ + 0.1 · (ln ¾ + ln ¼) / 2 with ε = 0.1:

        >>> from math import log
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(LabelSmoothing, logp=[log(0.75)], mean_logp=[(log(0.75) + log(0.25)) / 2])
        0.3426
    """

    family = Family.TOKEN
    config = LabelSmoothingOptions
    needs = frozenset({Need.MEAN_LOGP})
    metrics = frozenset({"token_accuracy", "entropy", "nll/token"})

    def __call__(
        self, batch: TokenBatch, config: LabelSmoothingOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return a value for each supervised token, in nats."""
        smoothed = (1 - config.epsilon) * batch.logp + config.epsilon * batch.mean_logp
        return LossOutput(
            [Term(-smoothed * batch.weight, TOKEN_MEAN)],
            {
                "token_accuracy": batch.top1.to(batch.entropy.dtype),
                "entropy": batch.entropy.detach(),
                "nll/token": -batch.logp.detach(),
            },
        )
