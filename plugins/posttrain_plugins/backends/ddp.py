"""Data parallel: every rank holds the whole model; gradients are averaged."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from posttrain.errors import StageError
from posttrain_plugins.backends.group import Group

_NAMES = inspect.signature(DistributedDataParallel).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
"""Newer versions of torch know the option by another name. A forward pass is to send nothing."""


class Ddp(Group):
    """torch's DistributedDataParallel, whose ranks talk once a step, during its last backward pass."""

    _wrapper: Any = None

    def wrap(self, model: Any, optimizer: Any, precision: Any = None) -> tuple[Any, Any]:
        """Put the wrapper around the model; it also gives every rank the weights of rank 0."""
        options: dict[str, Any] = {"find_unused_parameters": self._searches, _BUFFERS: False}
        self._wrapper = DistributedDataParallel(model, **options)
        self._wrapper.require_backward_grad_sync = False
        return self._wrapper, optimizer

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to this rank's own gradient; average with the last one.

        Whether gradients are averaged is decided between the forward pass and the backward pass, here: forward
        passes are not all followed by a backward pass, and which one is the last is known only now. Nothing is
        averaged before `wrap`: memory may be measured then.
        """
        averaging = last and self._wrapper is not None
        if averaging:
            self._wrapper.reducer.prepare_for_backward([loss] if self._searches else [])
        loss.backward()
        if averaging and not self._searches:
            self._require_gradients()

    @property
    def _searches(self) -> bool:
        return bool(self.config.find_unused_parameters)  # type: ignore[attr-defined]

    def _require_gradients(self) -> None:
        """Refuse parameters that the last backward pass did not reach: no other of their bucket has been averaged."""
        try:
            # The wrapper does this before its next forward pass, and complains then: after the update.
            self._wrapper.reducer._rebuild_buckets()
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            named = self._wrapper.module.named_parameters()
            unused = [name for name, each in named if each.requires_grad and each.grad is None]
            raise StageError(
                "some trainable parameters take no part in the model's output",
                where="backend",
                found=", ".join(unused[:5]) or "parameters that only some micro-batches use",
                fix="set find_unused_parameters: true on the backend, which looks for them in every step",
            ) from error
