"""Processes by pid *and* start (pids are used again), and process groups."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_TICKS = 2**33
"""More ticks than a machine counts from one boot to the next (2.7 years at 100 a second)."""
_BOOTS = 2**20
_PAUSE = 0.05


def start_time(pid: int) -> float | None:
    """Return what tells a living process from every other that has its pid; None for a dead one or a zombie.

    A number to be compared with `alive`, not a time of day: where there is `/proc` it is made of the ticks
    from boot to the process's start and of the boot's id, so that it survives a change of the clock.
    """
    return _start_from_proc(pid) if (_PROC / "self" / "stat").exists() else _start_from_ps(pid)


def alive(pid: int, started: float) -> bool:
    """Whether the process `pid` that `start_time` called `started` still runs. An ended child is reaped."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return start_time(pid) == started


def same_boot(started: float) -> bool:
    """Whether what `start_time` called `started` began since this machine was started."""
    now = start_time(os.getpid())
    return now is not None and abs(now - started) < _TICKS


def group_alive(group: int, started: float | None = None) -> bool:
    """Whether a process group has a member that still runs; dead ones that nobody has reaped do not count.

    Args:
        group: The group, which has the pid of its leader.
        started: What `start_time` said of the leader. The number of a group is not used again while a member
            lives, so a group without a leader is the same one; a leader of another start means that it is not, and
            so does another boot.
    """
    if started is not None:
        # `alive` reaps a leader that is a child of this process.
        if alive(group, started):
            return True
        if start_time(group) is not None or not same_boot(started):
            return False
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not (_PROC / "self" / "stat").exists():
        return True
    members = (_fields(int(path.name)) for path in _PROC.iterdir() if path.name.isdigit())
    return any(fields is not None and int(fields[2]) == group for fields in members)


def terminate(pid: int, started: float, patience: float = 10.0) -> None:
    """End a group, with or without its leader: SIGTERM, then SIGKILL after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not group_alive(pid, started):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        deadline = time.monotonic() + patience
        while group_alive(pid, started) and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def _start_from_proc(pid: int) -> float | None:
    fields = _fields(pid)
    return None if fields is None else float(_boot() * _TICKS + int(fields[19]) % _TICKS)


def _fields(pid: int) -> list[str] | None:
    """Return what `/proc` says of a process that runs, from its state on; None for a dead one or a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may hold spaces: fields are counted from the last one.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


@cache
def _boot() -> int:
    """Return a number for this boot, small enough to leave a float room for the ticks."""
    name = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_bytes()
    return int.from_bytes(hashlib.sha256(name.strip()).digest()[:8]) % _BOOTS


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
