"""One forked rank, seen from both sides."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from posttrain.contracts.backend import Place
from posttrain.contracts.stage import StageContext
from posttrain.errors import Interrupted, PosttrainError, StageError
from posttrain.execution.signals import describe_exit
from posttrain_plugins.launchers.follower import FollowerContext

FOLDER = "ranks"
"""What the ranks leave for each other, in the stage's scratch."""
STUCK = 30.0
"""Seconds that rank 0 may go on after another rank has failed: then it hangs in a collective, and is ended."""
_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


def follow(
    parent: int,
    output: int,
    context: StageContext,
    place: Place,
    take_share: Callable[[], None],
    work: Callable[[StageContext, Place], Any],
) -> NoReturn:
    """Be a rank in a process that was just forked; never returns into the code that forked it.

    Args:
        parent: The process id of rank 0.
        output: A pipe that standard output and standard error go to.
        context: Rank 0's context.
        place: Where this rank stands.
        take_share: Called before anything is computed.
        work: What to do.
    """
    code = 1
    folder = context.work / FOLDER
    own = FollowerContext(context, folder / f"output-{place.rank}")
    try:
        _die_with(parent)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 is asked to stop, and tells the others
        take_share()
        work(own, place)
        code = 0
    except Interrupted:
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must end here, and be told
        traceback.print_exc()
        _tell(folder / f"error-{place.rank}.json", error)
    finally:
        try:
            own.discard()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _die_with(parent: int) -> None:
    """Have the system kill this process when rank 0 ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _tell(path: Path, error: BaseException) -> None:
    parts = (
        error.as_dict()
        if isinstance(error, PosttrainError)
        else {"message": f"{type(error).__name__}: {error}"}
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**parts, "time": time.time()}))
    temporary.replace(path)


class Follower:
    """A forked rank.

    Args:
        rank: Its number.
        pid: Its process.
        output: The pipe that it prints to.
        folder: Where it leaves what went wrong.
    """

    def __init__(self, rank: int, pid: int, output: int, folder: Path) -> None:
        self.rank, self.pid, self.output, self.folder = rank, pid, output, folder
        self.code: int | None = None
        self.when = 0.0
        self._over = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True)

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it should."""
        return self._ended.is_set() and self.code != 0

    @property
    def said(self) -> dict[str, Any] | None:
        """What it said about its failure; None when it could not."""
        path = self.folder / f"error-{self.rank}.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
        return found

    def start(self, over: threading.Event) -> None:
        """Start to watch it.

        Args:
            over: Set when rank 0 has done its part.
        """
        self._over = over
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it came."""
        return self._ended.wait(seconds)

    def end(self) -> None:
        """Kill it if it has not ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._thread.join()

    def error(self, ranks: int) -> StageError:
        """Return its failure as rank 0's."""
        said = self.said
        where = f"rank {self.rank} of {ranks}"
        if said is None:
            return StageError(
                "a rank of the training ended", where=where, found=describe_exit(self.code or 0)
            )
        return StageError(
            f"a rank of the training failed: {said['message']}",
            where=f"{where}, {said['where']}" if said.get("where") else where,
            found=said.get("found"),
            expected=said.get("expected"),
            fix=said.get("fix"),
        )

    def _watch(self) -> None:
        """Pass on what it prints, then take note of its end."""
        with os.fdopen(self.output, errors="replace") as lines:
            for line in lines:
                sys.stderr.write(f"[rank {self.rank}] {line}")
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        self.when = time.time() if self.said is None else self.said["time"]
        self._ended.set()
        if self.code != 0 and not self._over.wait(STUCK):
            sys.stderr.write(f"{self.error(self.rank + 1)}\nrank 0 hangs, and is ended\n")
            sys.stderr.flush()
            os._exit(1)
