"""Calls into plugins: whatever one of them raises or prints stays its own.

A plugin may print at import, exit or raise anything. The rest of the program goes on, `--json` output stays
clean, and the failure is known by one line and by the place inside the plugin.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

TRACE = "POSTTRAIN_TRACE_PLUGINS"
"""Environment variable: `1` reports each import of a plugin with its time on the standard error stream."""

_runs = 0
"""How many runs go on: the threads of a run write to standard output, which belongs to all of them."""
_counting = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """What a plugin raised: one line, and `file:line` of the innermost frame inside the plugin."""

    error: str
    where: str | None = None

    def __str__(self) -> str:
        return f"{self.error} ({self.where})" if self.where else self.error


def isolated(label: str, package: str, call: Callable[[], T], *, redirect: bool = True) -> T | Failure:
    """Return what `call` returns, or how it failed.

    Args:
        label: What is being done, for the trace.
        package: The plugin's top-level module; frames of it and of its submodules are "inside the plugin".
        call: The call into the plugin. `KeyboardInterrupt` passes through, `SystemExit` does not.
        redirect: Send what it prints to the standard error stream. That is done in the main thread alone and
            never during a run: standard output belongs to all threads.
    """
    began = time.perf_counter()
    alone = threading.current_thread() is threading.main_thread() and not _runs
    with contextlib.redirect_stdout(sys.stderr) if redirect and alone else contextlib.nullcontext():
        try:
            result: T | Failure = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, and exit; it is reported
            result = Failure(_one_line(error), _place(error, package))
    if os.environ.get(TRACE) == "1":
        end = f"failed: {result}" if isinstance(result, Failure) else "done"
        sys.stderr.write(f"posttrain: {label}: {end}, {(time.perf_counter() - began) * 1000:.1f} ms\n")
    return result


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave standard output alone while the block, a run, lasts."""
    global _runs
    with _counting:
        _runs += 1
    try:
        yield
    finally:
        with _counting:
            _runs -= 1


def _one_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    text = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    return text if len(text) <= 400 else text[:399] + "…"


def _place(error: BaseException, package: str) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", ""))
        if name == package or name.startswith(f"{package}."):
            place = f"{frame.f_code.co_filename}:{line}"
    return place
