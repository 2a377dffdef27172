"""What a stage really ran on, for the record: never part of a key."""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.planning.versions import current_versions


def used_versions() -> dict[str, str]:
    """Return the versions of Python, of posttrain and of the tracked libraries that were imported."""
    always = ("python", "posttrain")
    return {
        name: version for name, version in current_versions().items() if name in always or name in sys.modules
    }


def used_device(device: str | None) -> str:
    """Return the device in words, such as `cpu (x86_64)` or `cuda (NVIDIA H200)`."""
    torch: Any = sys.modules.get("torch")
    if device == "cuda" and torch is not None and torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name(0)})"
    return f"cpu ({platform.machine()})"


def take_threads() -> None:
    """Let a library that is imported already use as many threads as `OMP_NUM_THREADS` says now.

    Libraries read the variable once, when they are imported: in a forked worker and in the caller's own
    process that may be long ago.
    """
    torch: Any = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block: heavy imports make millions of objects that stay, and hardly any garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def kept_threads() -> Iterator[None]:
    """Put this process's number of threads back after the block."""
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if before is not None:
            torch.set_num_threads(before)


def used_threads(threads: int | None) -> int:
    """Return the number of threads of numerical libraries."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    return threads or os.cpu_count() or 1
