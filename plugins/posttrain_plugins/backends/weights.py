"""A model's weights as one ordinary state dict: every parameter under all of its names, and every saved buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import StoreError

Named = tuple[list[str], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor as it is: nothing is sharded."""
    return tensor


def ordinary(
    model: Any, trainable: bool, gather: Callable[[Tensor], Tensor] = whole, keep: bool = True
) -> dict[str, Tensor]:
    """Return a model's parameters and saved buffers on the CPU.

    A tensor with several names (tied embeddings) is gathered once, so that it stays one tensor.

    Args:
        model: A model that is not wrapped.
        trainable: Leave frozen parameters out.
        gather: Returns the whole of a sharded tensor; called on every rank.
        keep: Whether this rank wants the result; an empty dict is returned otherwise.
    """
    found: dict[str, Tensor] = {}
    for names, tensor in stateful(model, trainable):
        gathered = gather(tensor).detach()
        if keep:
            found.update(dict.fromkeys(names, gathered.to("cpu").contiguous()))
    return found


def stateful(model: Any, trainable: bool = False) -> Iterator[Named]:
    """Yield each parameter and saved buffer once, with all of its names."""
    saved = model.state_dict(keep_vars=True)
    buffers = [
        (name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved
    ]
    parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or not trainable
    ]
    names: dict[int, list[str]] = {}
    for name, tensor in [*parameters, *buffers]:
        names.setdefault(id(tensor), []).append(name)
    yield from (
        (names.pop(id(tensor)), tensor) for _, tensor in [*parameters, *buffers] if id(tensor) in names
    )


def copy_into(
    model: Any, weights: Mapping[str, Tensor], put: Callable[[Tensor, Tensor], None] | None = None
) -> None:
    """Copy an ordinary state dict, of everything or of what is trainable, into a model.

    Args:
        model: A model that is not wrapped.
        weights: The tensors; one with several names may stand under any of them.
        put: Copies a whole tensor into one of the model's; `Tensor.copy_` where nothing is sharded.

    Raises:
        StoreError: Names or shapes are not the model's.
    """
    found = [(each, [name for name in each[0] if name in weights]) for each in stateful(model)]
    needed = {id(tensor) for _, tensor in stateful(model, trainable=True)}
    known = {name for _, names in found for name in names}
    missing = [names[0] for (names, tensor), given in found if not given and id(tensor) in needed]
    wrong = sorted([*(weights.keys() - known), *missing])
    if wrong:
        raise StoreError("the saved weights do not fit the model", found=", ".join(wrong[:5]))
    with torch.no_grad():
        for (_, tensor), given in found:
            if given:
                (put or _put)(tensor, weights[given[0]])


def _put(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise StoreError(
            "a saved weight has another shape than the model's",
            found=str(tuple(value.shape)),
            expected=str(tuple(tensor.shape)),
        )
    tensor.copy_(value)
