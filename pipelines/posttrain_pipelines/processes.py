"""Ending processes, by pid *and* start time."""

from __future__ import annotations

import os
import signal
import time

from posttrain.execution.processes import alive, start_time

__all__ = ["alive", "start_time", "terminate"]


def terminate(pid: int, started: float, patience: float = 10.0) -> None:
    """End a process group's leader and its group: SIGTERM, then SIGKILL after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not alive(pid, started):
            return
        os.killpg(pid, number)
        deadline = time.monotonic() + patience
        while alive(pid, started) and time.monotonic() < deadline:
            time.sleep(0.05)
