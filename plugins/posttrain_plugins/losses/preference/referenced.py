"""What losses against a reference share: β, log-ratios, metrics, and one value for each pair."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, Need, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD
from posttrain_plugins.losses.preference.metrics import rewards

if TYPE_CHECKING:
    from torch import Tensor


class BetaOptions(Config):
    """Options of losses that are pulled to a reference."""

    beta: float = Field(default=0.1, gt=0, description="strength of the pull to the reference policy")


class SmoothedOptions(BetaOptions):
    """The same, for losses that can take some preferences to be wrong."""

    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs whose preference is the wrong way round (cDPO)",
    )


class ReferencedLoss(Loss):
    """Base of losses with one value for each pair, averaged over pairs; row weights multiply the values."""

    family = Family.PREFERENCE
    config: ClassVar[type[BetaOptions]] = BetaOptions
    needs = frozenset({Need.REFERENCE})
    metrics = TOLD

    def __call__(self, batch: PreferenceBatch, config: Any, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each pair, in nats."""
        values = self.values(batch, config, state) * batch.weight
        return LossOutput([Term(values, EXAMPLE_MEAN)], rewards(batch, config.beta))

    @abstractmethod
    def values(self, batch: PreferenceBatch, config: Any, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""


def log_ratios(batch: PreferenceBatch) -> tuple[Tensor, Tensor]:
    """Return log π/π_ref of the chosen and of the rejected answers, shape [P] each."""
    return batch.chosen - batch.reference_chosen, batch.rejected - batch.reference_rejected
