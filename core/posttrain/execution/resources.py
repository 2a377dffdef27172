"""Who may use what of this machine now: counted CPUs, GPUs and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from posttrain.errors import Interrupted
from posttrain.planning.capacity import Machine
from posttrain.planning.spec import Resources

_POLL = 0.2


@dataclass(frozen=True)
class Demand:
    """What one node needs."""

    cpus: int
    gpus: int
    memory: int

    @classmethod
    def of(cls, resources: Resources, machine: Machine, *, heavy: bool) -> Demand:
        """Return what a node needs on this machine.

        Without `cpus:`, a stage that computes (it preloads libraries) takes all CPUs, or its GPUs' share,
        and any other stage one. So the number of threads never depends on what else happens to run.
        """
        share = machine.cpus
        if resources.gpus and machine.gpus:
            share = max(1, machine.cpus * resources.gpus // len(machine.gpus))
        return cls(
            cpus=resources.cpus or (share if heavy else 1),
            gpus=resources.gpus,
            memory=resources.memory_bytes or 0,
        )

    def fits(self, room: Machine) -> bool:
        """Tell whether there is that much."""
        return self.cpus <= room.cpus and self.gpus <= len(room.gpus) and self.memory <= room.memory


@dataclass(frozen=True)
class Grant:
    """What a node may use until it gives it back."""

    cpus: int
    gpus: tuple[str, ...]
    memory: int


@dataclass
class Pool:
    """Hands out a machine's resources to the threads of one run."""

    machine: Machine
    _free: Machine = field(init=False)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._free = self.machine

    @contextmanager
    def granted(self, node: str, demand: Demand, stopping: Callable[[], bool]) -> Iterator[Grant]:
        """Wait until the demand can be met and hold what was granted.

        Args:
            node: The node.
            demand: No more than the machine has: `Machine.require`.
            stopping: Tells whether the run was asked to stop.

        Raises:
            Interrupted: The run was asked to stop meanwhile.
        """
        assert demand.fits(self.machine), "or it would wait for ever"
        with self._changed:
            while not demand.fits(self._free):
                if stopping():
                    raise Interrupted(
                        "stopped while waiting for resources", where=node, fix="posttrain resume"
                    )
                self._changed.wait(_POLL)
            grant = self._take(demand)
        try:
            yield grant
        finally:
            with self._changed:
                self._free = Machine(
                    self._free.cpus + grant.cpus,
                    tuple(sorted((*self._free.gpus, *grant.gpus), key=self.machine.gpus.index)),
                    self._free.memory + grant.memory,
                )
                self._changed.notify_all()

    def _take(self, demand: Demand) -> Grant:
        free = self._free
        gpus, rest = free.gpus[: demand.gpus], free.gpus[demand.gpus :]
        self._free = Machine(free.cpus - demand.cpus, rest, free.memory - demand.memory)
        return Grant(demand.cpus, gpus, demand.memory)
