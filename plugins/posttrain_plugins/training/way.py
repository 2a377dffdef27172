"""Which head and which layout a model's scores are computed by: the fastest that agree with the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.trainer import Example
from posttrain_plugins.training.head import TOLERANCE, Head, Wanted, choose_head, choose_value_head
from posttrain_plugins.training.head.fused import MEMORY
from posttrain_plugins.training.layouts import LAYOUTS, Layout, choose_layout
from posttrain_plugins.training.layouts.choice import Read
from posttrain_plugins.training.microbatch import MicroBatch
from posttrain_plugins.training.options import Precision

STEPS = 8
"""Steps whose lengths the choice of a layout rests on."""
PRECISIONS: Mapping[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What autocast computes in."""


@dataclass(frozen=True)
class Way:
    """How scores are computed.

    Args:
        head: How supervised positions get their log-probs, or places their numbers.
        layout: How examples are laid out in rows.
        told: What is slower than it could be, and why.
    """

    head: Head
    layout: Layout
    told: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """What a model is tried out with.

    Args:
        tried: Examples whose scores are compared with the plain model's.
        steps: Those of some steps, for the cost of a layout.
        pad: A token id to pad with.
        device: Where the model is.
        precision: Name of what to compute in.
    """

    tried: Sequence[Example]
    steps: Sequence[Sequence[Example]]
    pad: int
    device: torch.device
    precision: Precision

    def way(self, model: Any, layout: str, kept: int = MEMORY, valued: bool = False) -> Way:
        """Choose head and layout.

        Args:
            model: The policy, prepared for its ranks but not wrapped.
            layout: Name of the layout to use; `auto`: the cheapest that is exact.
            kept: Bytes of logits that may be kept for the backward pass.
            valued: The model gives numbers rather than log-probs.

        Raises:
            StageError: No head reads the model, or the layout is not exact for it.
        """
        tolerance = TOLERANCE[self.precision != "float32"]
        padded = LAYOUTS["padded"].arrange(self.tried, self.pad, self.device)
        named = None if layout == "auto" else layout
        with computing(self.device, PRECISIONS[self.precision]):
            head, told, read = (
                _judge(model, padded) if valued else (*choose_head(model, padded, tolerance, kept), None)
            )
            chosen, why = choose_layout(model, self.steps, self.tried, tolerance, named, read)
        return Way(head, chosen, tuple(filter(None, (told, why))))


def _judge(model: Any, padded: MicroBatch) -> tuple[Head, str | None, Read]:
    """Return the head of a model that gives numbers, and how to read these off it."""
    head = choose_value_head(model, padded)

    def read(model: Any, micro: MicroBatch) -> Tensor:
        value = head(model, micro, Wanted()).value
        assert value is not None, "such a head gives numbers"
        return value

    return head, None, read


def computing(device: torch.device, precision: torch.dtype | None) -> torch.autocast:
    """Return a context that computes in a precision; None: as the weights are."""
    return torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None)
