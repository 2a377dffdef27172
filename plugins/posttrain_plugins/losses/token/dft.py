"""Dynamic fine-tuning."""

from __future__ import annotations

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family, Loss, LossOutput, State, Stats, Term, TokenBatch
from posttrain.contracts.reduction import TOKEN_MEAN


class Dft(Loss):
    """L = −(1/N) Σ_t w · sg(p_t) · log p_t with p_t = π(y_t | x, y_<t), over the N supervised tokens of the step.

    sg stops the gradient: each token's gradient is that of the likelihood times its own probability. With `nll`,
    unlikely tokens change the model most; here, those that it half believes already.

    When to use: few or noisy demonstrations for a model that knows most of the task; not to teach new facts, whose
    tokens are unlikely. Values cannot be compared with those of `nll`.

    Reduction: mean over supervised tokens.

    Source: Wu et al. 2025, eq. 9 (https://arxiv.org/abs/2508.05629).

    Example:
        (½ ln 2 + ¼ ln 4) / 2:

        >>> from math import log
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Dft, logp=[log(0.5), log(0.25)])
        0.3466
    """

    family = Family.TOKEN
    metrics = frozenset({"token_accuracy", "entropy", "dft/probability"})

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return a value for each supervised token, in nats."""
        probability = batch.logp.detach().exp()
        return LossOutput(
            [Term(-probability * batch.logp * batch.weight, TOKEN_MEAN)],
            {
                "token_accuracy": batch.top1.to(batch.entropy.dtype),
                "entropy": batch.entropy.detach(),
                "dft/probability": probability,
            },
        )
