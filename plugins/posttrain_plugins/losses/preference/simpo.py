"""Simple preference optimization."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.loss import Family, Loss, LossOutput, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, MarginOptions, likelihood, logistic, token_means, told


class SimpoOptions(MarginOptions):
    """Options of the loss `simpo`."""

    cpo_alpha: float = Field(
        default=0.0, ge=0, description="weight of the negative log-likelihood of the chosen answers; 0: none"
    )


class Simpo(Loss):
    """L = −log σ(β (log π(c | x) / |c| − log π(r | x) / |r|) − γ).

    c and r are the chosen and the rejected answer to x, |·| their numbers of tokens: the reward of an answer is the
    mean log-prob of its tokens, so repeating it changes nothing. γ is the margin that is aimed at, given as it stands
    (`gamma`) or as γ / β (`gamma_beta_ratio`): papers and tools use both, and one taken for the other is off by β.
    `cpo_alpha` > 0 adds CPO's likelihood term (CPO-SimPO).

    When to use: pairs whose answers differ in length, no reference; watch that answers do not degenerate.

    Reduction: mean over pairs.

    Source: Meng et al. 2024, eq. 6 (https://arxiv.org/abs/2405.14734), who search β in 2.0-2.5, γ / β in 0.3-0.5.

    Example:
        2.5 (−1 + 1.5) − 1.375 = −0.125, and ln(1 + e^0.125) = 0.7576; 1.375 is 0.55 times β:

        >>> from posttrain_plugins.testing.worked import worked
        >>> pair = dict(chosen=[-4.0], chosen_tokens=[4], rejected=[-3.0], rejected_tokens=[2])
        >>> worked(Simpo, {"beta": 2.5, "gamma": 1.375}, **pair)
        0.7576
        >>> worked(Simpo, {"beta": 2.5, "gamma_beta_ratio": 0.55}, **pair)
        0.7576
    """

    family = Family.PREFERENCE
    config = SimpoOptions
    metrics = TOLD

    def __call__(
        self, batch: PreferenceBatch, config: SimpoOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return a value for each pair, and the likelihood of the chosen answers where asked for."""
        chosen, rejected = (config.beta * each for each in token_means(batch))
        values = logistic(chosen - rejected - config.margin, config.label_smoothing) * batch.weight
        return LossOutput(
            [Term(values, EXAMPLE_MEAN), *likelihood(batch, "chosen", config.cpo_alpha)],
            told(batch, chosen, rejected),
        )
