"""Groups of processes by the leader's pid *and* start, also when the leader is gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from posttrain.execution import processes
from posttrain.execution.processes import alive, start_time

__all__ = ["alive", "group_alive", "start_time", "terminate"]


def group_alive(pid: int, started: float) -> bool:
    """Whether the leader, or a process of the group that it led, still runs.

    The kernel gives no process a number by which a group is still known. So a group without a leader is the same
    one, and where another process has got the number, nothing is left of ours.
    """
    if alive(pid, started):
        return True
    unled = start_time(pid) is None and processes.same_boot(started)
    return unled and processes.group_alive(pid)


def terminate(pid: int, started: float, patience: float = 10.0) -> None:
    """End a group, with or without its leader: SIGTERM, then SIGKILL after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not group_alive(pid, started):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        deadline = time.monotonic() + patience
        while group_alive(pid, started) and time.monotonic() < deadline:
            time.sleep(0.05)
