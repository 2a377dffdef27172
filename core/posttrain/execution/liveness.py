"""No orphans: the pipe that tells a worker that its parent is gone, and the end of a process group.

The parent alone holds the write end. When it dies, however it dies, the kernel closes the pipe, and the
watcher in every worker kills its own group, grandchildren included (no parent-death signal reaches them).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from posttrain.execution.processes import group_alive
from posttrain.execution.protocol import LIVENESS_FD, LOCK_FD


class Lifeline:
    """The parent's side: both ends are closed on exec, so that only the read end ever travels."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Close both ends; every worker that still lives kills itself."""
        for end in (self._write_end, self.read_end):
            os.close(end)


def adopt_descriptors() -> None:
    """Start to watch the parent and keep the inherited descriptors from programs that the stage starts.

    A worker that a person runs by hand has no such descriptors and watches nobody.
    """
    lock, watched = os.environ.get(LOCK_FD), os.environ.get(LIVENESS_FD)
    if lock is not None:
        os.set_inheritable(int(lock), False)
    if watched is not None:
        os.set_inheritable(int(watched), False)
        threading.Thread(target=_watch, args=(int(watched),), name="liveness", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill what is left of a worker's process group, whether or not the worker itself still lives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def await_group_end(pid: int, seconds: float = 5.0) -> None:
    """Wait until a killed group is dead, so that a successor does not meet it in its directory."""
    deadline = time.monotonic() + seconds
    while group_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
