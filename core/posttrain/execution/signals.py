"""Asking a process to stop: what a signal means to the parent and to the worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A request to stop. Plain attributes, so that a signal handler may set them without taking a lock."""

    def __init__(self) -> None:
        self.requested = False
        self.urgent = False

    def ask(self) -> None:
        """Ask once to stop in an orderly way, a second time to stop at once."""
        self.urgent = self.requested
        self.requested = True

    def __bool__(self) -> bool:
        return self.requested


@contextmanager
def on_stop_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act(signal number)` on SIGINT and SIGTERM; elsewhere than in the main thread, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        act(number)

    before = {number: signal.signal(number, handler) for number in _STOPPING}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def worker_handler(stop: Stop) -> Callable[[int], None]:
    """Return a handler that asks the stage to checkpoint and stop; a second signal ends the process."""

    def act(number: int) -> None:
        if stop.requested:
            os._exit(128 + number)
        stop.ask()

    return act


def describe_exit(code: int) -> str:
    """Say in words how a process ended, from its `subprocess` return code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; perhaps the machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
