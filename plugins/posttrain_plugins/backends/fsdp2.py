"""Fully sharded data parallel: parameters, gradients and optimizer state are split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from posttrain.contracts.backend import Place
from posttrain.contracts.component import Config
from posttrain.execution.environment import variables
from posttrain_plugins.backends.group import FORGOTTEN, LOOPBACK, Group
from posttrain_plugins.backends.weights import copy_into, ordinary

PATIENCE = timedelta(days=1)
"""How long a rank waits for another one to load the whole model: a slow disk is no reason to end a run. A rank that
fails ends the others without it."""


class Fsdp2(Group):
    """torch's `fully_shard` on each layer and on the model as a whole.

    Args:
        place: Where this rank stands.
        config: The backend's options.
    """

    layout = "fsdp2"

    def __init__(self, place: Place, config: Config) -> None:
        super().__init__(place, config)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,))
        with variables(LOOPBACK, hidden=FORGOTTEN):
            self._turns = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._turn()

    @contextmanager
    def loading(self) -> Iterator[str | None]:
        """Let one rank after the other open the whole model on the CPU and keep its shards.

        `fully_shard` moves a layer to the rank's device when it splits it, so no device ever holds the whole model.
        """
        for _ in range(self.rank):
            self._turn()
        yield "cpu"
        for _ in range(self.size - self.rank):
            self._turn()

    def _turn(self) -> None:
        """Wait for every rank, as long as a turn may take."""
        dist.all_reduce(torch.zeros(1), group=self._turns)

    def prepare(self, model: Any) -> None:
        """Shard in place; the optimizer is to see the sharded parameters."""
        if isinstance(model, FSDPModule):
            _reshard(model)
            return
        for layer in layers(model):
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def wrap(self, model: Any, optimizer: Any, precision: Any = None) -> tuple[Any, Any]:
        """Leave both as they are: `prepare` did it."""
        assert isinstance(model, FSDPModule), "prepare(model) comes first"
        return model, optimizer

    def backward(self, loss: Tensor, last: bool) -> None:
        """Reduce and scatter with every micro-batch, so that no rank ever holds a whole gradient."""
        loss.backward()

    def clip(self, model: Any, limit: float) -> float:
        """Clip to the norm over all shards."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def weights(self, model: Any, trainable: bool = False) -> Mapping[str, Tensor]:
        """Gather one tensor after the other."""
        _reshard(model)
        return ordinary(model, trainable, _whole, keep=self.rank == 0)

    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Give each rank its shards of the weights, which all of them have read."""
        _reshard(model)
        copy_into(model, weights, _put)

    def state(self, optimizer: Any) -> Any:
        """Return the state of this rank's shards."""
        return _local(optimizer.state_dict())

    def restore(self, optimizer: Any, state: Any) -> None:
        """Put the shards back in their places on the mesh."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        placed = {
            index: {name: _like(parameters[index], value) for name, value in kept.items()}
            for index, kept in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": placed})


def layers(model: Any) -> list[Any]:
    """Return the blocks that are sharded apart: those that transformers says are not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def _reshard(model: Any) -> None:
    """Free what a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _put(tensor: Tensor, value: Tensor) -> None:
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # Every rank has the value, so nothing is sent.
        value = distribute_tensor(value.to(tensor.device), mesh, placements, src_data_rank=None)
    tensor.copy_(value)


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return value


def _like(parameter: Tensor, value: Any) -> Any:
    """Return a shard of an optimizer's state as the parameter is placed; numbers such as Adam's step stay."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.to_local().shape or parameter.dim() == 0:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
