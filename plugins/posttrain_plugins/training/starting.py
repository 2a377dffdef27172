"""The policy that a training started from, while it goes on, without a second copy of the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.errors import StageError
from posttrain_plugins.models.adapters import tolerated
from posttrain_plugins.models.mode import evaluating

Values = Mapping[str, Tensor]
"""What this rank holds of each trained parameter, by name."""


class StartingPolicy:
    """Brings the exact starting policy back for a while, as the reference of an online trainer.

    A fresh adapter that computes nothing yet is switched off for it, which costs no memory. Everything else is
    kept as it was and exchanged in place: the trained tensors of an adapter (PiSSA, OLoRA, DoRA, a continued
    one), or all weights when all are trained. Parameters stay the same objects in the same memory, so neither
    the optimizer nor a wrapper that shards or reduces them notices, and the base of an adapter is never written.

    Make it before the first update, and before a checkpoint is loaded.

    Args:
        model: The policy, possibly wrapped by DDP or sharded by FSDP2.
        kept: First values of what is trained; nothing where switching the adapter off does.
    """

    def __init__(self, model: Any, kept: Values) -> None:
        self._model, self._kept = model, kept

    @classmethod
    def of(cls, model: Any, probe: Callable[[], Tensor]) -> StartingPolicy:
        """Take down the model as it is now.

        Args:
            model: The policy, possibly wrapped.
            probe: Runs the model on something with every kind of token that matters, the same on every rank.
                It decides whether switching the adapter off is the starting policy, bit by bit, and stays so
                whatever becomes of the trained tensors.

        Raises:
            StageError: The model is partitioned by DeepSpeed's stage 3.
        """
        if _peft_model(model) is not None and _off_is_start(model, probe):
            return cls(model, {})
        return cls(model, {name: tensor.clone() for name, tensor in _held(model).items()})

    @classmethod
    def kept(cls, model: Any, values: Values | None = None) -> StartingPolicy:
        """Keep all trained tensors, which may follow the policy: those of the model as it is now, or other ones.

        Raises:
            StageError: The model is partitioned by DeepSpeed's stage 3.
            KeyError: A trained tensor has no other value.
        """
        held = _held(model)
        source = held if values is None else values
        return cls(model, {name: source[name].to(tensor, copy=True) for name, tensor in held.items()})

    @property
    def values(self) -> Values:
        """What is kept."""
        return self._kept

    @torch.no_grad()
    def follow(self, alpha: float) -> None:
        """Let what is kept be α · policy + (1 − α) · what was kept, parameter by parameter."""
        for name, tensor in _held(self._model).items():
            self._kept[name].mul_(1 - alpha).add_(tensor, alpha=alpha)

    @property
    def memory(self) -> int:
        """Bytes that this rank keeps for it."""
        return sum(first.numel() * first.element_size() for first in self._kept.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model be the starting policy, in evaluation mode and without gradients.

        Its parameters, their gradients and what requires one are bit for bit the same afterwards, also when an
        error leaves the block.
        """
        as_it_was = _exchanged(self._model, self._kept) if self._kept else _switched_off(self._model)
        with as_it_was, evaluating(self._model):
            yield


@contextmanager
def _exchanged(model: Any, values: Values) -> Iterator[None]:
    """Exchange what is trained for other values, and back."""
    done: list[str] = []
    try:
        held = _held(model)
        for name, value in values.items():
            _exchange(held[name], value)
            done.append(name)
        yield
    finally:
        held = _held(model)
        for name in done:
            _exchange(held[name], values[name])


def _exchange(one: Tensor, other: Tensor) -> None:
    content = one.clone()
    one.copy_(other)
    other.copy_(content)


@contextmanager
def _switched_off(model: Any) -> Iterator[None]:
    """Switch the adapter off. peft freezes it meanwhile and unfreezes all of it, so flags are put back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with tolerated(), _peft_model(model).disable_adapter():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _off_is_start(model: Any, probe: Callable[[], Tensor]) -> bool:
    """Whether the model without its adapter is the one with it, and stays so when the adapter changes."""

    def without(context: AbstractContextManager[Any]) -> Tensor:
        with context, _switched_off(model), evaluating(model):
            return probe()

    with evaluating(model):
        start = probe()
    moved = {name: tensor + 1 for name, tensor in _held(model).items()}
    same = [torch.equal(start, without(context)) for context in (nullcontext(), _exchanged(model, moved))]
    return all(same)


def _peft_model(model: Any) -> Any:
    return next((module for module in model.modules() if hasattr(module, "disable_adapter")), None)


def _held(model: Any) -> Values:
    """Return the memory of what is trained that this rank holds and that forward passes read from.

    FSDP2 leaves gathered copies behind; they are dropped, so that the next forward pass gathers anew.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if any(hasattr(parameter, "ds_tensor") for parameter in trained.values()):
        raise StageError(
            "the starting policy cannot be kept beside weights that DeepSpeed's stage 3 partitions",
            where="backend",
            found="deepspeed, stage 3",
            expected="weights of which each rank holds whole ones or its own shards",
            fix="use `backend: {name: fsdp2, ranks: N}`, which splits weights too, or `{name: deepspeed, stage: 2}`",
        )
    # `data` and not `detach()`: that contents come and go is no change a waiting backward pass should mind.
    return {name: _local(parameter.data) for name, parameter in trained.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
