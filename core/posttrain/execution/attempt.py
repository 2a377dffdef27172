"""One attempt at a node: its files, its supervision, and whether it counts as a success."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from posttrain import errors
from posttrain.artifacts.sealing import read_manifest
from posttrain.errors import Interrupted, StageError
from posttrain.execution.blame import storage_error
from posttrain.execution.journal import EVENTS, tail_events
from posttrain.execution.launch import Handle
from posttrain.execution.protocol import Output, Result
from posttrain.execution.signals import Stop, describe_exit
from posttrain.execution.worker import RESULT, UNSTORED

_POLL = 0.2
_LOG_LINES = 20
_LOG_BYTES = 16_384


class AttemptFailed(StageError):
    """A worker did not succeed; `error` holds what it said of itself and the end of its output."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        parts = {name: error.get(name) for name in ("where", "found", "expected", "fix")}
        super().__init__(str(error["message"]), **parts)
        self.error = dict(error)

    def as_dict(self) -> dict[str, Any]:
        """Return the worker's own account."""
        return self.error


@dataclass(frozen=True)
class Attempt:
    """The directory of one attempt."""

    number: int
    directory: Path

    @classmethod
    def next(cls, stage: Path) -> Attempt:
        """Make the directory of a node's next attempt."""
        stage.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name) for path in stage.iterdir() if path.name.isdigit()), default=0)
        (stage / str(number)).mkdir()
        return cls(number, stage / str(number))

    @property
    def request(self) -> Path:
        """What the worker is to do."""
        return self.directory / "request.json"

    @property
    def log(self) -> Path:
        """What the worker printed."""
        return self.directory / "output.log"

    @property
    def events(self) -> Path:
        """What the stage reported on its way."""
        return self.directory / EVENTS

    @property
    def result(self) -> Path:
        """What came out."""
        return self.directory / RESULT


class Tail:
    """Forwards an attempt's events while the block runs, and what is left at its end."""

    def __init__(self, path: Path, forward: Callable[[dict[str, Any]], None]) -> None:
        self._path = path
        self._forward = forward
        self._offset = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)

    def __enter__(self) -> Tail:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._drain()

    def _follow(self) -> None:
        while not self._over.wait(_POLL):
            self._drain()

    def _drain(self) -> None:
        events, self._offset = tail_events(self._path, self._offset)
        for event in events:
            self._forward(event)


def supervise(handle: Handle, stop: Stop, grace: float, asked_to_stop: Callable[[], None]) -> int:
    """Wait for a worker's end and return its exit code; pass a stop on once, and kill after `grace` seconds.

    Args:
        handle: The worker.
        stop: Whether the run was asked to stop.
        grace: Seconds the worker may take to checkpoint.
        asked_to_stop: Called once the worker was asked.

    Raises:
        LauncherLost: The launcher died under it.
    """
    asked: float | None = None
    while (code := handle.wait(_POLL)) is None:
        if stop.urgent or (asked is not None and time.monotonic() - asked > grace):
            handle.kill()
        elif stop.requested and asked is None:
            asked = time.monotonic()
            handle.terminate()
            asked_to_stop()
    return code


def judge(attempt: Attempt, code: int, ports: frozenset[str], stop: Stop) -> Result:
    """Return the result of an attempt that counts as a success: exit 0, a valid result, and sealed outputs.

    Raises:
        Interrupted: The worker stopped as it was asked to.
        AttemptFailed: Anything else.
    """
    result, problem = _read_result(attempt)
    if result is not None and result.status == "stopped":
        raise Interrupted(
            "stopped as asked; its checkpoint is kept", where=str(attempt.directory), fix="posttrain resume"
        )
    if result is not None and result.status == "failed":
        raise AttemptFailed(_account(attempt, result))
    if stop.requested and code != 0:
        raise Interrupted(
            f"the worker {describe_exit(code)} while the run was stopping",
            where=str(attempt.directory),
            fix="posttrain resume",
        )
    if result is None and code == UNSTORED:
        raise AttemptFailed(_no_room(attempt))
    if result is None or code != 0:
        after = " after it had written its result" if result is not None else ""
        raise _failed(attempt, f"the worker {describe_exit(code)}{after}", found=problem)
    if {output.port for output in result.outputs} != ports:
        found = ", ".join(sorted(output.port for output in result.outputs))
        raise _failed(
            attempt, "the result lacks outputs or has some too many", found, ", ".join(sorted(ports))
        )
    for output in result.outputs:
        _check_sealed(attempt, output)
    return result


def _read_result(attempt: Attempt) -> tuple[Result | None, str | None]:
    try:
        return Result.model_validate_json(attempt.result.read_bytes()), None
    except FileNotFoundError:
        return None, "no result.json"
    except ValidationError as error:
        return None, f"a result.json that cannot be read: {error}"


def _check_sealed(attempt: Attempt, output: Output) -> None:
    manifest = read_manifest(Path(output.sealed), output.digest)
    if manifest.kind != output.kind:
        raise _failed(
            attempt,
            f"output {output.port!r} is of another kind than the result says",
            manifest.kind,
            output.kind,
        )


def _account(attempt: Attempt, result: Result) -> dict[str, Any]:
    """Return what the worker said of itself, with the end of its output unless the error explains itself."""
    error = result.error or {"message": "the stage failed"}
    kind = getattr(errors, str(error.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, errors.PosttrainError):
        return dict(error)
    return {**error, "log": log_tail(attempt.log, result.traceback)}


def _no_room(attempt: Attempt) -> dict[str, Any]:
    """Return what a worker would have said that could store nothing."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(attempt.result))
    return dict(storage_error(full, attempt.directory).as_dict())


def _failed(
    attempt: Attempt, message: str, found: str | None = None, expected: str | None = None
) -> AttemptFailed:
    parts = {"type": "StageError", "message": message, "where": str(attempt.directory), "found": found}
    return AttemptFailed({**parts, "expected": expected, "fix": None, "log": log_tail(attempt.log)})


def log_tail(path: Path, told: str = "") -> str:
    """Return the last lines of an output file, without a text in it that is told already."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES - len(told.encode())), os.SEEK_SET)
        text = file.read().decode(errors="replace")
    if told:
        before, _, after = text.rpartition(told)
        text = before + after
    return "\n".join(text.splitlines()[-_LOG_LINES:])
