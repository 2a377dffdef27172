"""What this machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import ClassVar

from posttrain.errors import SpecError
from posttrain.planning.spec import Resources
from posttrain.wording import size

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

    def lacks(self, wanted: Resources) -> Iterator[Lack]:
        """Yield what a stage asks for and this machine does not have."""
        memory = wanted.memory_bytes or 0
        same = size(memory) == size(self.memory)
        if (wanted.cpus or 0) > self.cpus:
            yield Lack("resources.cpus", "CPUs", str(wanted.cpus), str(self.cpus))
        if wanted.gpus > len(self.gpus):
            yield Lack("resources.gpus", "GPUs", str(wanted.gpus), str(len(self.gpus)))
        if memory > self.memory:
            asked, there = (f"{count:,} bytes" if same else size(count) for count in (memory, self.memory))
            yield Lack("resources.memory", "memory", asked, there)

    def require(self, node: str, wanted: Resources) -> None:
        """Refuse a node that asks for more than there is.

        Raises:
            SpecError: This machine has less.
        """
        for lack in self.lacks(wanted):
            raise SpecError(
                lack.message,
                where=f"{node}.{lack.option}",
                found=lack.asked,
                expected=f"at most {lack.there}",
                fix=lack.fix,
            )


@dataclass(frozen=True)
class Lack:
    """More asked for than there is.

    Args:
        option: Where it is asked for.
        what: What it is.
        asked: How much.
        there: How much the machine has.
    """

    option: str
    what: str
    asked: str
    there: str
    fix: ClassVar[str] = "lower it, or run the pipeline on a larger machine"

    @property
    def message(self) -> str:
        """What is wrong."""
        return f"this node asks for more {self.what} than this machine has"


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
