"""Backward passes that add gradients where they belong, instead of making them, handing them on and adding them.

A weight of a large vocabulary's size has a gradient of the same size. Made anew for each micro-batch, it would be there
twice and be written and read once more. Parameters whose gradient somebody hooks on to get it through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_under_way: ContextVar[Accumulation | None] = ContextVar("accumulation", default=None)


class Accumulation:
    """One backward pass on a CPU, where autograd works in the thread that calls it."""

    def __init__(self) -> None:
        self._later: list[Callable[[], None]] = []

    def after(self, add: Callable[[], None]) -> None:
        """Have something added once the pass is over, when a gradient that it adds to is there."""
        self._later.append(add)

    def run(self, loss: Tensor) -> None:
        """Back-propagate a loss, and add what is left to be added."""
        token = _under_way.set(self)
        try:
            torch.autograd.backward(loss)
            for add in self._later:
                add()
        finally:
            _under_way.reset(token)


def under_way(weight: Tensor) -> Accumulation | None:
    """Return the pass of this kind that calls, if one does and may add to the gradient of a parameter itself."""
    if not isinstance(weight, nn.Parameter) or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return _under_way.get()


def begun(weight: Tensor) -> Tensor | None:
    """Return the gradient that a parameter has so far, if a backward pass under way may add to it itself."""
    return None if under_way(weight) is None else weight.grad
