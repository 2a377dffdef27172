"""The logistic loss of reward models on pairs."""

from __future__ import annotations

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, Need, RewardBatch, State, Stats, Term, held
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.reward.metrics import DIAGNOSTICS, diagnostics, mean_by_example


class BradleyTerryOptions(Config):
    """Options of the loss `bradley_terry`."""

    center: float = Field(
        default=0.0,
        ge=0,
        description="weight of the squared sum of both rewards, which keeps rewards around 0; 0.01 is a usual one",
    )


class BradleyTerry(Loss):
    """L = −log σ(r⁺ − r⁻ − m) + c (r⁺ + r⁻)², averaged over the pairs of a prompt, then over prompts.

    r⁺ and r⁻ are the rewards of a better and a worse answer, m is the row's `margin` (0 without that column) and c is
    `center`. Every two answers with different scores are a pair, and a prompt counts once however many it has. Only
    differences of rewards are learned; centring fixes where 0 is.

    When to use: pairs, and several ranked answers where only the order of each two counts.

    Reduction: the mean over examples. Bradley and Terry 1952; over all pairs of a prompt: Ouyang et al. 2022, eq. 1
    (https://arxiv.org/abs/2203.02155); the margin: Touvron et al. 2023, eq. 2 (https://arxiv.org/abs/2307.09288);
    centring: Eisenstein et al. 2023, eq. 2 (https://arxiv.org/abs/2312.09244).

    Example:
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(BradleyTerry, reward=[2.0, 1.0])  # −log σ(1)
        0.3133
        >>> worked(BradleyTerry, {"center": 0.01}, reward=[2.0, 1.0], margin=[1.0])  # ln 2 + 0.01 · 3²
        0.7831
    """

    family = Family.REWARD
    config = BradleyTerryOptions
    needs = frozenset({Need.RIVALS, Need.MARGIN})
    metrics = DIAGNOSTICS

    def __call__(
        self, batch: RewardBatch, config: BradleyTerryOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return a value for each prompt, in nats, and one for the centring where that is asked for."""
        from torch.nn.functional import logsigmoid

        better, worse = batch.pairs
        example = batch.example[better]
        chosen, rejected = batch.reward[better], batch.reward[worse]
        margin = held(batch.margin, Need.MARGIN, "margin")
        ranked = -logsigmoid(chosen - rejected - margin[example])
        terms = [Term(mean_by_example(ranked, example, batch) * batch.weight, EXAMPLE_MEAN)]
        if config.center:
            centred = mean_by_example((chosen + rejected).square(), example, batch)
            terms.append(Term(centred * batch.weight, EXAMPLE_MEAN, config.center))
        return LossOutput(terms=terms, metrics=diagnostics(batch))
