"""The backends: their options and where their heavy halves are. Light."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.contracts.backend import Backend, Ranks, Split
from posttrain.contracts.component import NoOptions
from posttrain_plugins.training.optimizers import OPTIMIZERS

_HERE = "posttrain_plugins.backends"
WHOLE_TENSORS = frozenset(
    name for name, about in OPTIMIZERS.items() if about.package is not None or name == "adafactor"
)
"""Optimizers that look at a tensor as a whole (adafactor's rows and columns, blocks of 8-bit state)."""


class SingleProcess(Backend):
    """One process."""

    config = NoOptions
    target = f"{_HERE}.single:Single"

    def ranks(self, config: Any) -> int:
        """One."""
        return 1


class DataParallelOptions(Ranks):
    """Options of `ddp`."""

    find_unused_parameters: bool = Field(
        default=False, description="look in each step for parameters that took no part in it, on any rank"
    )


class DataParallel(Backend):
    """Every rank holds the whole model and averages gradients with the others."""

    config = DataParallelOptions
    target = f"{_HERE}.ddp:Ddp"


class FullyShardedDataParallel(Backend):
    """Parameters, gradients and optimizer state are split over the ranks (https://arxiv.org/abs/2304.11277)."""

    target = f"{_HERE}.fsdp2:Fsdp2"

    def split(self, config: Any) -> frozenset[Split]:
        """All of it."""
        return frozenset(Split)

    def problems(self, config: Any, training: Any) -> Sequence[str]:
        """Report what does not work on parts of tensors."""
        return [*_on_parts("fsdp2", training)]


class ZeroOptions(Ranks):
    """Options of `deepspeed`."""

    stage: Literal[1, 2, 3] = Field(
        default=2,
        description="what is split over the ranks: optimizer state (1), gradients too (2), weights too (3)",
    )
    persistence_threshold: int = Field(
        default=0, ge=0, description="stage 3: weights with fewer elements stay whole on every rank"
    )

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.persistence_threshold and self.stage < 3:
            raise ValueError("persistence_threshold would be ignored: only stage 3 splits weights")
        return self


class DeepSpeed(Backend):
    """DeepSpeed's ZeRO (https://arxiv.org/abs/1910.02054)."""

    config = ZeroOptions
    target = f"{_HERE}.zero:Zero"

    def split(self, config: ZeroOptions) -> frozenset[Split]:
        """As much as the stage says."""
        return frozenset((Split.OPTIMIZER, Split.GRADIENTS, Split.WEIGHTS)[: config.stage])

    def problems(self, config: Any, training: Any) -> Sequence[str]:
        """Report what does not work on parts of tensors or with DeepSpeed."""
        found = [*_on_parts("deepspeed", training)]
        if getattr(training, "fp16", False):
            found.append(
                "deepspeed here computes in float32 or, with bf16, in bfloat16; fp16 needs another backend"
            )
        return found


def _on_parts(name: str, training: Any) -> Iterator[str]:
    optim = getattr(training, "optim", None)
    if optim in WHOLE_TENSORS:
        yield f"optim `{optim}` needs whole tensors, of which a rank of {name} has parts; use adamw_torch"
    if getattr(training, "quantization", None) is not None:
        yield f"{name} cannot split weights in 4 bits; use ddp, or leave quantization out"
