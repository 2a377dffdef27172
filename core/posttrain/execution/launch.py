"""How a stage's process is started and held: in a fresh interpreter, or inline in the caller's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.execution import worker
from posttrain.execution.environment import variables
from posttrain.execution.liveness import kill_group
from posttrain.execution.machine import kept_threads

MODULE = "posttrain.execution"


@dataclass(frozen=True)
class Job:
    """What a launcher needs to start one worker.

    Args:
        request: The request file.
        log: Where the worker's output goes.
        environment: Its whole environment.
        descriptors: Inherited descriptors by the environment variable that names them.
        python: Another interpreter, or None for this one.
        preload: Modules the stage wants imported before a fork.
        forkable: Whether a preloaded interpreter may fork it.
        redact: Removes the stage's secrets from its output; None when it has none.
    """

    request: Path
    log: Path
    environment: Mapping[str, str]
    descriptors: Mapping[str, int]
    python: str | None = None
    preload: tuple[str, ...] = ()
    forkable: bool = False
    redact: Callable[[str], str] | None = None

    @property
    def full_environment(self) -> dict[str, str]:
        """The environment with the descriptors' numbers."""
        return {**self.environment, **{name: str(number) for name, number in self.descriptors.items()}}


class LauncherLost(Exception):
    """The launcher died under a worker, which must be started again by another launcher."""


class Handle(ABC):
    """A started worker."""

    pid: int | None

    @abstractmethod
    def wait(self, timeout: float) -> int | None:
        """Return the exit code (negative: the signal that killed it), or None while it still runs.

        Once the worker has ended, whatever is left of its process group is killed.

        Raises:
            LauncherLost: Its end cannot be known any more.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Ask the worker alone to checkpoint and stop (SIGTERM)."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker's whole process group."""


class Launcher(Protocol):
    """Starts workers."""

    def start(self, job: Job) -> Handle:
        """Start the worker; returns at once."""


class Log:
    """The worker's output file, written by the worker or, when it holds secrets, by a redacting thread."""

    def __init__(self, job: Job) -> None:
        self._thread: threading.Thread | None = None
        if job.redact is None:
            self.descriptor = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            return
        read_end, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=_copy, args=(read_end, job.log, job.redact), daemon=True)
        self._thread.start()

    def handed_over(self) -> None:
        """Close this process's own writing end once the worker has its copy."""
        os.close(self.descriptor)

    def finish(self) -> None:
        """Wait until everything is in the file."""
        if self._thread is not None:
            self._thread.join(timeout=10)


def _copy(read_end: int, path: Path, redact: Callable[[str], str]) -> None:
    with os.fdopen(read_end, "rb") as source, path.open("a", encoding="utf-8") as file:
        for line in source:
            file.write(redact(line.decode(errors="replace")))
            file.flush()


class ProcessLauncher:
    """Starts a fresh interpreter in its own session; no file of the working directory shadows a module."""

    def start(self, job: Job) -> Handle:
        """Start the worker; returns at once."""
        log = Log(job)
        try:
            process = subprocess.Popen(
                [job.python or sys.executable, "-P", "-m", MODULE, str(job.request)],
                env=job.full_environment,
                stdin=subprocess.DEVNULL,
                stdout=log.descriptor,
                stderr=log.descriptor,
                pass_fds=tuple(job.descriptors.values()),
                start_new_session=True,
            )
        finally:
            log.handed_over()
        return ProcessHandle(process, log)


class ProcessHandle(Handle):
    """A worker that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Log) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or None while it still runs."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        kill_group(self._process.pid)
        self._log.finish()
        return code

    def terminate(self) -> None:
        """Send one SIGTERM to the worker."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the group."""
        kill_group(self._process.pid)


class InlineLauncher:
    """Runs the stage in the caller's own process, for debuggers and notebooks; one stage at a time.

    Args:
        stopping: Whether the run was asked to stop.
        debug: Let a stage's exception through to the caller instead of turning it into a failed result.
        secrets: Names of the variables that any stage declared; each sees its own alone.
    """

    def __init__(
        self, stopping: Callable[[], bool], debug: bool = False, secrets: Collection[str] = ()
    ) -> None:
        self._stopping = stopping
        self._debug = debug
        self._secrets = secrets
        self._one_at_a_time = threading.Lock()

    def start(self, job: Job) -> Handle:
        """Run the stage to its end, then return."""
        with (
            self._one_at_a_time,
            kept_threads(),
            variables(job.environment, self._secrets),
            job.log.open("a", encoding="utf-8") as log,
        ):
            return InlineHandle(worker.run(job.request, self._stopping, log=log, debug=self._debug))


class InlineHandle(Handle):
    """A stage that has already ended."""

    def __init__(self, code: int) -> None:
        self.pid = os.getpid()
        self._code = code

    def wait(self, timeout: float) -> int | None:
        """Return the exit code."""
        return self._code

    def terminate(self) -> None:
        """Do nothing: the stage has ended."""

    def kill(self) -> None:
        """Do nothing: the stage has ended."""
