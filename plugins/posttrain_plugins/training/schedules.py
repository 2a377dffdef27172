"""Learning-rate schedules by their names in transformers: what each takes beside its warm-up. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Config, NoOptions

ScheduleName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
    "warmup_stable_decay",
]


class Cosine(Config):
    """Half a cosine, or as many waves as asked for."""

    num_cycles: float = Field(default=0.5, gt=0, description="waves from the warm-up to the last step")


class Restarts(Config):
    """Half cosines, one after the other; a single one would be `cosine`."""

    num_cycles: int = Field(ge=2, description="half cosines from the warm-up to the last step")


class Floor(Cosine):
    """A cosine that ends above zero."""

    min_lr: float | None = Field(default=None, gt=0, description="the learning rate to end at")
    min_lr_rate: float | None = Field(
        default=None, gt=0, lt=1, description="the same as a share of the peak; one of the two"
    )

    @model_validator(mode="after")
    def _one_floor(self) -> Self:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("give either min_lr or min_lr_rate")
        return self


class Polynomial(Config):
    """A power of the share of steps that are left."""

    lr_end: float = Field(default=1e-7, ge=0, description="the learning rate to end at")
    power: float = Field(default=1.0, gt=0, description="exponent; 1 is a straight line")


class InverseRoot(Config):
    """1 / √step."""

    timescale: int | None = Field(
        default=None, ge=1, description="steps; unset: those of the warm-up, or 10,000 without one"
    )


class Plateau(Config):
    """Warm-up, a constant rate and a decay over the last steps."""

    num_decay_steps: int = Field(ge=1, description="steps of the decay, the last ones")
    warmup_type: Literal["linear", "cosine", "1-sqrt"] = Field(default="linear", description="its shape")
    decay_type: Literal["linear", "cosine", "1-sqrt"] = Field(default="cosine", description="its shape")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="the share of the peak to start and end at"
    )


SCHEDULES: Mapping[str, type[Config]] = {
    "linear": NoOptions,
    "cosine": Cosine,
    "cosine_with_restarts": Restarts,
    "cosine_with_min_lr": Floor,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseRoot,
    "constant": NoOptions,
    "constant_with_warmup": NoOptions,
    "warmup_stable_decay": Plateau,
}
"""What `lr_scheduler_kwargs` may hold, by schedule."""

FITTED = ("polynomial", "warmup_stable_decay")
"""Schedules that do not fit a run with too few steps."""
