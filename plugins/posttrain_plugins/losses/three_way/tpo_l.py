"""Triple preference optimization with mean log-probs and a margin."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.loss import Family, Loss, LossOutput, State, Stats, Term, ThreeWayBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, MarginOptions, likelihood, logistic, token_means, told


class TpoLOptions(MarginOptions):
    """Options of the loss `tpo_l`."""

    gamma_beta_ratio: float | None = Field(
        default=0.8,
        ge=0,
        description="the same margin as a share of beta, γ / beta, in nats a token; left out where `gamma` is given",
    )
    tpo_alpha: float = Field(
        default=1.0, gt=0, description="weight of the negative log-likelihood of the gold answers"
    )


class TpoL(Loss):
    """L = −log σ(β (log π(c | x) / |c| − log π(r | x) / |r|) − γ) + α · NLL(g).

    c, r and g are the chosen, the rejected and the gold answer to x, |·| their numbers of tokens. NLL(g) = −log
    π(g | x) a token; α is `tpo_alpha`. The margin γ has the two spellings of `simpo`.

    When to use: as `tpo`, where answers of a pair differ in length.

    Reduction: mean over pairs; the NLL over the gold tokens of the step.

    Source: Saeidi et al. 2024, TPO-L (https://arxiv.org/abs/2405.16681); β = 2 and γ = 1.6 are its authors' for a
    base model of 7B parameters.

    Example:
        2 (−1 + 1.5) − 1 = 0, so the pair costs ln 2; each of two gold tokens costs 1.5 nats:

        >>> from posttrain_plugins.testing.worked import worked
        >>> pair = dict(chosen=[-4.0], chosen_tokens=[4], rejected=[-3.0], rejected_tokens=[2])
        >>> worked(TpoL, {"beta": 2.0, "gamma": 1.0}, gold=[-3.0], gold_tokens=[2], **pair)
        2.1931
    """

    family = Family.THREE_WAY
    config = TpoLOptions
    metrics = TOLD | {"logps/gold"}

    def __call__(self, batch: ThreeWayBatch, config: TpoLOptions, stats: Stats, state: State) -> LossOutput:
        """Return a value for each pair, and the likelihood of the gold answers."""
        chosen, rejected = (config.beta * each for each in token_means(batch))
        values = logistic(chosen - rejected - config.margin, config.label_smoothing) * batch.weight
        return LossOutput(
            [Term(values, EXAMPLE_MEAN), *likelihood(batch, "gold", config.tpo_alpha)],
            {**told(batch, chosen, rejected), "logps/gold": batch.gold.detach()},
        )
