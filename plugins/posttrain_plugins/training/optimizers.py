"""Optimizers by their names in transformers: what each takes and keeps. Light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Config, NoOptions

OptimizerName = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_bnb_8bit",
    "ademamix",
    "ademamix_8bit",
    "lion_32bit",
    "lion_8bit",
    "adafactor",
    "adagrad",
    "rmsprop",
    "sgd",
]


class Sgd(Config):
    """Options of `sgd`."""

    momentum: float = Field(default=0.0, ge=0, lt=1, description="share of the last update that is kept")
    nesterov: bool = Field(default=False, description="look ahead by the momentum")

    @model_validator(mode="after")
    def _nothing_to_look_ahead_by(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum")
        return self


class Rmsprop(Config):
    """Options of `rmsprop`."""

    alpha: float = Field(default=0.99, ge=0, lt=1, description="decay of the mean square")
    eps: float = Field(default=1e-8, gt=0, description="term against division by zero")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="share of the last update that is kept")
    centered: bool = Field(default=False, description="divide by the deviation, not by the mean square")


class Adagrad(Config):
    """Options of `adagrad`."""

    lr_decay: float = Field(default=0.0, ge=0, description="decay of the learning rate by step")
    eps: float = Field(default=1e-10, gt=0, description="term against division by zero")


class Ademamix(Config):
    """Options of `ademamix` (https://arxiv.org/abs/2409.03137)."""

    beta3: float = Field(default=0.9999, ge=0, lt=1, description="decay of the slow first moment")
    alpha: float = Field(default=5.0, ge=0, description="weight of the slow first moment")


@dataclass(frozen=True)
class Optimizer:
    """What there is to know of an optimizer before it is made.

    Args:
        adam: Which of the options `adam_…` it reads.
        extra: What `optim_args` may hold.
        moments: Numbers it keeps for each parameter.
        bits: Of each of them; embeddings always get 32.
        package: The package it comes from, beside torch and transformers.
    """

    adam: tuple[str, ...] = ()
    extra: type[Config] = NoOptions
    moments: int = 0
    bits: int = 32
    package: str | None = None

    def floats(self, parameters: int, embeddings: int) -> int:
        """Return the size of its state, in float32 numbers.

        Args:
            parameters: How many are trained.
            embeddings: How many of them belong to embeddings.
        """
        return self.moments * ((parameters - embeddings) * self.bits // 32 + embeddings)


_BETAS = ("adam_beta1", "adam_beta2")
_ADAM = (*_BETAS, "adam_epsilon")
_BNB = "bitsandbytes"

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(_ADAM, moments=2),
    "adamw_torch": Optimizer(_ADAM, moments=2),
    "adamw_bnb_8bit": Optimizer(_ADAM, moments=2, bits=8, package=_BNB),
    "ademamix": Optimizer(_ADAM, Ademamix, moments=3, package=_BNB),
    "ademamix_8bit": Optimizer(_ADAM, Ademamix, moments=3, bits=8, package=_BNB),
    "lion_32bit": Optimizer(_BETAS, moments=1, package=_BNB),
    "lion_8bit": Optimizer(_BETAS, moments=1, bits=8, package=_BNB),
    "adafactor": Optimizer(),
    "adagrad": Optimizer(extra=Adagrad, moments=1),
    "rmsprop": Optimizer(extra=Rmsprop, moments=1),
    "sgd": Optimizer(extra=Sgd),
}
ADAM_OPTIONS = _ADAM
