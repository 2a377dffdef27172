"""What this machine has, and who may use it now: counted CPUs, GPUs and memory."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from posttrain.errors import Interrupted, StageError
from posttrain.planning.spec import Resources

_POLL = 0.2
CONTROL = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """What there is: usable CPUs, ids of visible GPUs, bytes of memory."""

    cpus: int
    gpus: tuple[str, ...]
    memory: int

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine without touching CUDA."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            count = sum(
                1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()
            )
            gpus = tuple(str(number) for number in range(count))
        else:
            gpus = _listed(visible)
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(min([cpus, *_cpu_quotas()]), gpus, min([memory, *_memory_limits()]))


def _listed(visible: str) -> tuple[str, ...]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` leaves; as for CUDA, a negative one ends the list."""
    parts = [part.strip() for part in visible.split(",")]
    return tuple(part for part in takewhile(lambda part: not part.startswith("-"), parts) if part)


def _cpu_quotas(control: Path = CONTROL) -> list[int]:
    """Return the whole CPUs that each control group around this process leaves to it."""
    quotas = (text.split() for text in _control_values("cpu.max", control))
    return [max(1, math.ceil(int(quota) / int(period))) for quota, period in quotas if quota != "max"]


def _memory_limits(control: Path = CONTROL) -> list[int]:
    """Return the bytes that each control group around this process leaves to it."""
    return [int(text) for text in _control_values("memory.max", control) if text.strip() != "max"]


def _control_values(name: str, control: Path) -> Iterator[str]:
    """Yield a setting of this process's control group (v2) and of those around it."""
    membership = Path("/proc/self/cgroup")
    lines = membership.read_text().splitlines() if membership.exists() else []
    own = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), "")
    for group in (control / own, *(control / own).parents):
        if group.is_relative_to(control) and (group / name).is_file():
            yield (group / name).read_text()


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

        Raises:
            StageError: The machine does not have that much.
            Interrupted: The run was asked to stop meanwhile.
        """
        self._refuse_impossible(node, demand)
        with self._changed:
            while not self._fits(demand):
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

    def _fits(self, demand: Demand) -> bool:
        free = self._free
        return demand.cpus <= free.cpus and demand.gpus <= len(free.gpus) and demand.memory <= free.memory

    def _take(self, demand: Demand) -> Grant:
        free = self._free
        gpus, rest = free.gpus[: demand.gpus], free.gpus[demand.gpus :]
        self._free = Machine(free.cpus - demand.cpus, rest, free.memory - demand.memory)
        return Grant(demand.cpus, gpus, demand.memory)

    def _refuse_impossible(self, node: str, demand: Demand) -> None:
        machine = self.machine
        for name, wanted, there in (
            ("CPUs", demand.cpus, machine.cpus),
            ("GPUs", demand.gpus, len(machine.gpus)),
            ("bytes of memory", demand.memory, machine.memory),
        ):
            if wanted > there:
                raise StageError(
                    f"this node asks for more {name} than this machine has",
                    where=node,
                    found=f"{wanted} {name}",
                    expected=f"at most {there}",
                    fix="lower its `resources:`, or run it on a larger machine",
                )
