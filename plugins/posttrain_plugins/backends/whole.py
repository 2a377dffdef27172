"""What a rank does that has the whole model, its gradient and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain_plugins.backends.weights import copy_into, ordinary


class Whole(Parallel):
    """Base of backends; one that splits something overrides what that changes."""

    def clip(self, model: Any, limit: float) -> float:
        """Clip as torch does: every rank has the whole gradient."""
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

    def weights(self, model: Any, trainable: bool = False) -> Mapping[str, Tensor]:
        """Return rank 0's tensors."""
        return ordinary(model, trainable, keep=self.rank == 0)

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Copy into the model's tensors."""
        copy_into(model, weights)

    def state(self, optimizer: Any) -> Any:
        """Return the optimizer's own state."""
        return optimizer.state_dict()

    def restore(self, optimizer: Any, state: Any) -> None:
        """Let the optimizer load it."""
        optimizer.load_state_dict(state)
