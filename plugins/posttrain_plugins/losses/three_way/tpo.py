"""Triple preference optimization."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, State, Stats, Term, ThreeWayBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import SMOOTHING, TOLD, likelihood, logistic, told, widened


class TpoOptions(Config):
    """Options of the loss `tpo`."""

    beta: float = Field(default=0.01, gt=0, description="scale of the difference of log-probs")
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description=SMOOTHING)
    tpo_alpha: float = Field(
        default=1.0, gt=0, description="weight of the negative log-likelihood of the gold answers"
    )


class Tpo(Loss):
    """L = −log σ(β (log π(c | x) − log π(r | x))) + α · NLL(g).

    c, r and g are the chosen, the rejected and the gold answer to x, with log-probs summed over their tokens. NLL(g)
    = −log π(g | x) a token; α is `tpo_alpha`. With g = c it is CPO.

    When to use: an answer that is better than both of a pair is known, such as the best of several ranked ones.

    Reduction: mean over pairs; the NLL over the gold tokens of the step.

    Source: Saeidi et al. 2024, section 3 (https://arxiv.org/abs/2405.16681).

    Example:
        ln(1 + e^−0.2) + 0.5 · 3/2, as 0.1 (−2 + 4) = 0.2 and each of two gold tokens costs 1.5 nats:

        >>> from posttrain_plugins.testing.worked import worked
        >>> options = {"beta": 0.1, "tpo_alpha": 0.5}
        >>> worked(Tpo, options, chosen=[-2.0], rejected=[-4.0], gold=[-3.0], gold_tokens=[2])
        1.3481
    """

    family = Family.THREE_WAY
    config = TpoOptions
    metrics = TOLD | {"logps/gold"}

    def __call__(self, batch: ThreeWayBatch, config: TpoOptions, stats: Stats, state: State) -> LossOutput:
        """Return a value for each pair, and the likelihood of the gold answers."""
        chosen, rejected = config.beta * widened(batch.chosen), config.beta * widened(batch.rejected)
        values = logistic(chosen - rejected, config.label_smoothing) * batch.weight
        return LossOutput(
            [Term(values, EXAMPLE_MEAN), *likelihood(batch, "gold", config.tpo_alpha)],
            {**told(batch, chosen, rejected), "logps/gold": batch.gold.detach()},
        )
