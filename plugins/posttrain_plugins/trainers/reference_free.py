"""What trainers on pairs without a reference share: their options, and which losses they take."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.loss import Family
from posttrain.contracts.registration import Group
from posttrain_plugins.training.options import TrainingOptions

Losses = Annotated[
    Choice, Uses(Group.LOSS, having=(("family", Family.PREFERENCE), ("needs_reference", False)))
]
"""A loss over pairs without a reference: one that compares with it belongs to `train.dpo`."""


class WithoutDropout(TrainingOptions):
    """Options of trainers that turn dropout off."""

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.lora is not None and self.lora.dropout > 0:
            raise ValueError("lora.dropout would be ignored: this trainer turns dropout off")
        return self


class ReferenceFreeOptions(WithoutDropout):
    """Options of trainers on pairs without a reference."""

    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    loss: Losses


def reference_free(loss: str) -> Any:
    """Return the field of the option `loss` with its default."""
    return Field(
        default=Choice(name=loss), description="a loss over preference pairs that needs no reference"
    )
