"""Contrastive preference optimization."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import SMOOTHING, TOLD, likelihood, logistic, told, widened


class CpoOptions(Config):
    """Options of the loss `cpo`."""

    beta: float = Field(default=0.1, gt=0, description="scale of the difference of log-probs")
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description=SMOOTHING)
    cpo_alpha: float = Field(
        default=1.0, ge=0, description="weight of the negative log-likelihood of the chosen answers; 0: none"
    )


class Cpo(Loss):
    """L = −log σ(β (log π(c | x) − log π(r | x))) + α · NLL(c).

    c and r are the chosen and the rejected answer to x, with log-probs summed over their tokens: a long answer has a
    small one. NLL(c) = −log π(c | x) a token; it keeps the chosen answers likely, and α is `cpo_alpha`. It is DPO's
    loss with a reference that finds all answers equally likely.

    When to use: no room or time for a reference, and chosen answers that are good enough to be learned by heart.

    Reduction: mean over pairs; the NLL over the chosen tokens of the step.

    Source: Xu et al. 2024, eq. 3 (https://arxiv.org/abs/2401.08417); their NLL is summed over an answer.

    Example:
        ln(1 + e^−0.2) + 2/4, as β (−2 + 4) = 0.2 and each of four chosen tokens costs half a nat:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Cpo, chosen=[-2.0], rejected=[-4.0], chosen_tokens=[4])
        1.0981
    """

    family = Family.PREFERENCE
    config = CpoOptions
    metrics = TOLD

    def __call__(self, batch: PreferenceBatch, config: CpoOptions, stats: Stats, state: State) -> LossOutput:
        """Return a value for each pair, and the likelihood of the chosen answers."""
        chosen, rejected = config.beta * widened(batch.chosen), config.beta * widened(batch.rejected)
        values = logistic(chosen - rejected, config.label_smoothing) * batch.weight
        return LossOutput(
            [Term(values, EXAMPLE_MEAN), *likelihood(batch, "chosen", config.cpo_alpha)],
            told(batch, chosen, rejected),
        )
