"""Options that losses over good and bad answers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from posttrain.contracts.loss import UnpairedBatch
from posttrain_plugins.losses.preference.referenced import BetaOptions

if TYPE_CHECKING:
    from torch import Tensor


class SidedOptions(BetaOptions):
    """Strength, and how much good and bad answers count."""

    desirable_weight: float = Field(
        default=1.0,
        ge=0,
        description="multiplies the values of good answers; where these are fewer, more than 1 evens that out",
    )
    undesirable_weight: float = Field(default=1.0, ge=0, description="multiplies the values of bad answers")

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ValueError(
                "desirable_weight and undesirable_weight are both 0, so nothing would be learned"
            )
        return self

    def side(self, batch: UnpairedBatch) -> Tensor:
        """Return the weight of each answer's side, shape [U]."""
        good = batch.desirable.to(batch.logp)
        return self.desirable_weight * good + self.undesirable_weight * (1 - good)
