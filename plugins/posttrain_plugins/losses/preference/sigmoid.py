"""The logistic loss of direct preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, Need, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN

if TYPE_CHECKING:
    from torch import Tensor


class SigmoidOptions(Config):
    """Options of the loss `sigmoid`."""

    beta: float = Field(default=0.1, gt=0, description="strength of the pull to the reference policy")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs whose preference is the wrong way round (cDPO)",
    )


class Sigmoid(Loss):
    """L = −(1−ε) log σ(β Δ) − ε log σ(−β Δ), averaged over pairs.

    Δ = log π(chosen)/π_ref(chosen) − log π(rejected)/π_ref(rejected). Rafailov et al. 2023, eq. 7
    (https://arxiv.org/abs/2305.18290); ε > 0 is the conservative form of Mitchell 2023
    (https://ericmitchell.ai/cdpo.pdf). At the start, where the policy is its own reference, Δ = 0 and L = ln
    2.
    """

    family = Family.PREFERENCE
    config = SigmoidOptions
    needs = frozenset({Need.REFERENCE})

    def __call__(
        self, batch: PreferenceBatch, config: SigmoidOptions, stats: Stats, state: State
    ) -> LossOutput:
        """Return one term with a value for each pair, in nats."""
        from torch.nn.functional import logsigmoid

        scaled = config.beta * batch.margin
        values = -(1 - config.label_smoothing) * logsigmoid(scaled) - config.label_smoothing * logsigmoid(
            -scaled
        )
        return LossOutput(
            terms=[Term(values * batch.weight, EXAMPLE_MEAN)],
            metrics=_diagnostics(batch, config.beta),
        )


def _diagnostics(batch: PreferenceBatch, beta: float) -> dict[str, Tensor]:
    chosen = beta * (batch.chosen - batch.reference_chosen).detach()
    rejected = beta * (batch.rejected - batch.reference_rejected).detach()
    return {
        "rewards/accuracy": (chosen > rejected).to(chosen.dtype),
        "rewards/margin": chosen - rejected,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": batch.chosen.detach(),
        "logps/rejected": batch.rejected.detach(),
    }
