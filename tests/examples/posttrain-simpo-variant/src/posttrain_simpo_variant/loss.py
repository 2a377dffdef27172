"""SimPO with an anchor."""

from __future__ import annotations

from pydantic import Field

from posttrain import (
    EXAMPLE_MEAN,
    Config,
    Family,
    Loss,
    LossOutput,
    PreferenceBatch,
    RoleTokenMean,
    Term,
)


class AnchoredSimPOConfig(Config):
    """Options of `acme/simpo-variant`."""

    beta: float = Field(default=2.0, gt=0, description="how much a wrong margin costs")
    gamma: float = Field(default=0.5, ge=0, description="margin that a pair should have, in nats a token")
    anchor: float = Field(default=0.1, ge=0, description="weight of the likelihood of the chosen answers")


class AnchoredSimPO(Loss):
    """L = −log σ(β (m − γ)) + anchor · NLL(chosen), m = log π(chosen)/|chosen| − log π(rejected)/|rejected|.

    The first term is averaged over pairs, the second over the chosen tokens of the whole step. The first is SimPO, Meng
    et al. 2024 (https://arxiv.org/abs/2405.14734), with γ inside of β: their γ / β.

    Example:
        One token each, log-probs of −1 and −3: m − γ = 1.5, ln(1 + e^−3) = 0.0486, and 0.1 · 1 for the anchor

        >>> from posttrain_plugins.testing import worked
        >>> worked(AnchoredSimPO, chosen=[-1.0], rejected=[-3.0])
        0.1486
    """

    family = Family.PREFERENCE
    config = AnchoredSimPOConfig

    def __call__(self, batch: PreferenceBatch, config: AnchoredSimPOConfig, stats, state) -> LossOutput:
        from torch.nn.functional import logsigmoid

        margin = batch.chosen / batch.chosen_tokens - batch.rejected / batch.rejected_tokens
        values = -logsigmoid(config.beta * (margin - config.gamma)) * batch.weight
        terms = [Term(values, EXAMPLE_MEAN)]
        if config.anchor:
            terms.append(Term(-batch.chosen * batch.weight, RoleTokenMean("chosen"), config.anchor))
        return LossOutput(terms, {"simpo/margin": margin.detach()})
