"""Training in float16: the loss is scaled up so that small gradients do not vanish, and overflows are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.errors import TrainingDiverged

LIMIT = 20
"""Skipped steps in a row that stop a training. The scale has been halved as often."""


class Scaling:
    """The scale of the loss and the steps that were skipped because a gradient overflowed.

    Args:
        parallel: The ranks that share the model.

    Attributes:
        scaler: Torch's.
        skipped: Steps skipped so far.
        running: Those of them since the last one that was not.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.scaler = torch.amp.GradScaler(parallel.device.type)
        self.skipped = self.running = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss before it is back-propagated."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of a whole step by the scale, before they are clipped."""
        inner = plain(optimizer)
        self.scaler.unscale_(inner)
        # A rank that holds a part of the gradient sees the overflows of its part, and all of them have to skip.
        for found in self.scaler._per_optimizer_states[id(inner)]["found_inf_per_device"].values():
            found.copy_(self.parallel.sum(found))

    def count(self, skipped: bool, step: int, kept: str) -> None:
        """Take in whether a step was skipped.

        Args:
            skipped: Whether it was.
            step: Its number.
            kept: Which checkpoint there is to go back to, for people.

        Raises:
            TrainingDiverged: Too many in a row were.
        """
        self.skipped, self.running = self.skipped + skipped, self.running + 1 if skipped else 0
        if self.running >= LIMIT:
            raise TrainingDiverged(
                "the gradient overflows in float16 at every scale",
                where=f"step {step}",
                found=f"{self.running} steps in a row were skipped, at last with scale {self.scaler.get_scale():g}",
                fix=f"use bf16, or lower learning_rate; {kept}",
            )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped, "running": self.running}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.scaler.load_state_dict(state["scaler"])
        self.skipped, self.running = state["skipped"], state["running"]


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrapper that accelerate puts around it."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
