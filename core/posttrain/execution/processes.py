"""Processes by pid *and* start time (pids are used again)."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

TOLERANCE = 2.0
"""Seconds by which two readings of a process's start time may differ (boot time comes in whole seconds)."""


def start_time(pid: int) -> float | None:
    """Return when a living process started, in seconds since the epoch; None for a dead one or a zombie."""
    if Path("/proc/self/stat").exists():
        return _start_from_proc(pid)
    return _start_from_ps(pid)


def alive(pid: int, started: float) -> bool:
    """Whether the process `pid` that started at `started` still runs. An ended child is reaped."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    found = start_time(pid)
    return found is not None and abs(found - started) <= TOLERANCE


def _start_from_proc(pid: int) -> float | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command name stands in parentheses and may hold spaces: fields are counted from the last one
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")


@cache
def _boot_time() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise OSError("/proc/stat names no boot time")


def _start_from_ps(pid: int) -> float | None:
    found = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    state, _, started = found.stdout.strip().partition(" ")
    if not started or state.startswith("Z"):
        return None
    return time.mktime(time.strptime(started.strip(), "%a %b %d %H:%M:%S %Y"))
