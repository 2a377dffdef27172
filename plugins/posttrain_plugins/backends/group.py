"""What backends with several ranks have in common: the process group and what goes over it."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.contracts.backend import Place
from posttrain.contracts.component import Config
from posttrain.execution.environment import variables
from posttrain_plugins.backends.whole import Whole

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are on this machine, and nothing listens outside it."""
FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Libraries that find these would take the ranks for theirs."""

_LEFT: list[Any] = []
"""Groups that were left, until the process ends. gloo's destructor waits, holding the interpreter's lock, for threads
of its own that may be about to take that lock: right after a collective both would wait for ever."""


class Group(Whole):
    """The ranks of a training as a process group: gloo for what is on CPUs, NCCL for what is on GPUs.

    Args:
        place: Where this rank stands.
        config: The backend's options.
    """

    def __init__(self, place: Place, config: Config) -> None:
        self.rank, self.size, self.config = place.rank, place.size, config
        cuda = torch.cuda.is_available()
        # Each rank was given one GPU to see.
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        with variables(LOOPBACK, hidden=FORGOTTEN):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.FileStore(str(place.meeting), place.size),
                rank=place.rank,
                world_size=place.size,
            )
            # gloo connects at the first use, which must still see the interface.
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in the tensor's own precision."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def agree(self, value: Any) -> Any:
        """Send rank 0's value to everybody."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor(len(text))
        dist.broadcast(length, src=0)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(content, src=0)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Wait for every rank. Reducing a number on the CPU needs no GPU to be idle."""
        dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            _LEFT.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
