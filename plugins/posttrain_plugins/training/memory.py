"""How much memory there is, how much a token takes, and what that means for a micro-batch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.contracts.trainer import Example
from posttrain.errors import StageError
from posttrain_plugins.training.batches import Budget, cut
from posttrain_plugins.training.randomness import Replay

if TYPE_CHECKING:
    from posttrain_plugins.training.step import Stepper

TRIALS = (256, 1024)
"""Tokens of the two micro-batches that are measured."""
SHARE = 0.6
"""Part of the free memory that activations may take: the backward pass needs buffers beside them."""
LEAST = 64

_CGROUP = tuple(Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current", "stat"))


LACKS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says where it raises no error of its own for that."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in LACKS)
    )


@contextmanager
def short_of_memory(where: str) -> Iterator[None]:
    """Say what to do where memory runs out in a pass without gradient.

    Args:
        where: What the pass is for.

    Raises:
        StageError: Memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise StageError(
            "memory ran out",
            where=where,
            found=str(error).partition("\n")[0] or "no details",
            fix="lower micro_batch_tokens, or max_length where a micro-batch is one example already",
        ) from error


def free(device: torch.device) -> int:
    """Return the bytes that this process may still take.

    Raises:
        StageError: The system does not tell.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    _give_back()
    found = [*_host(), *_container()]
    if not found:
        raise StageError(
            "this system does not tell how much memory is free",
            where="micro_batch_tokens: auto",
            fix="give a number of tokens",
        )
    return min(found)


def _give_back() -> None:
    """Have the C library return the blocks that it keeps for later: they would count as taken."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _host() -> list[int]:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _container() -> list[int]:
    if not all(path.is_file() for path in _CGROUP):
        return []
    limit, used, stat = (path.read_text().strip() for path in _CGROUP)
    if limit == "max":
        return []
    # Files that were read, such as the model's own, count as used until somebody needs the room.
    cached = [int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")]
    return [int(limit) - int(used) + sum(cached)]


def saved_bytes(forward: Callable[[], Any], model: torch.nn.Module) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, the model's own tensors left out."""
    # Of a sharded parameter, what this rank holds.
    parameters = (
        tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in model.parameters()
    )
    own = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    total = sum(found.values())
    del kept
    return total


def bytes_per_token(stepper: Stepper, examples: Sequence[Example]) -> float:
    """Measure what a token of a micro-batch takes, the longest examples first. No weight or generator moves."""
    generators, training, sizes = Replay(stepper.device), stepper.model.training, []
    # Models recompute activations, and drop some, in training mode only.
    stepper.model.train()
    for tokens in TRIALS:
        part = cut(examples, stepper.layout, Budget(tokens))[0]
        micro = stepper.layout.arrange(part, stepper.pad, stepper.device)
        taken = generators.first(tokens, lambda: saved_bytes(lambda: stepper.score(micro), stepper.model))  # noqa: B023
        sizes.append((micro.tokens.numel(), taken))
    stepper.model.train(training)
    generators.rewind(TRIALS[0])
    (few, little), (many, much) = sizes
    return (much - little) / (many - few) if many > few else much / max(many, 1)


def recomputing(stepper: Stepper, examples: Sequence[Example], kept: float) -> float:
    """Have the model recompute activations and return what a token takes then, given what it took before.

    Beside what is kept for the backward pass, the activations of one layer at a time are there.
    """
    model = stepper.model
    # transformers does the same, later and with these arguments.
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    layers: int = model.config.get_text_config().num_hidden_layers
    return bytes_per_token(stepper, examples) + kept / layers


def measured_tokens(stepper: Stepper, taken: float, reserved: int, largest: int) -> int:
    """Return the tokens of a micro-batch that fit into the free memory, a power of two.

    Args:
        stepper: Scores with the policy.
        taken: Bytes that a token takes.
        reserved: Bytes that gradients, optimizer and kept logits will take.
        largest: Tokens of the largest step; more serve nothing.
    """
    # Ranks on CPUs are processes of one machine and share what it has.
    ranks = stepper.parallel.size if stepper.device.type == "cpu" else 1
    room = SHARE * (free(stepper.device) // ranks - reserved)
    tokens = int(room / max(taken, 1.0))
    if tokens < LEAST:
        raise StageError(
            "there is too little free memory to train this model",
            where="micro_batch_tokens: auto",
            found=f"room for {max(tokens, 0)} tokens beside weights, gradients and optimizer",
            expected=f"at least {LEAST}",
            fix="use gradient_checkpointing, adapters or a smaller model, or free memory",
        )
    return min(1 << (tokens.bit_length() - 1), 1 << (largest - 1).bit_length())
