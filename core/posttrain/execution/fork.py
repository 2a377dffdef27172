"""The parent's side of the zygote, and the choice between forking and a fresh interpreter."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from posttrain.execution.launch import Handle, Job, Launcher, LauncherLost, Log, ProcessLauncher
from posttrain.execution.liveness import await_group_end, kill_group
from posttrain.execution.zygote import MODULE, receive_message, send_message

_END_SECONDS = 5.0


class ZygoteLauncher:
    """Starts one zygote and lets it fork workers. `start` never waits for its imports.

    Args:
        preload: The modules to import.
        environment: The zygote's environment; must hold no secrets.
        log: Where its own output goes.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._environment = dict(environment)
        self._channel, theirs = socket.socketpair()
        self._numbers = itertools.count()
        self._handles: dict[int, ForkHandle] = {}
        self._lock = threading.Lock()
        self._dead = False
        self.log = log
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), *preload],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        threading.Thread(target=self._listen, name="zygote", daemon=True).start()

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    @property
    def dead(self) -> bool:
        """Whether the zygote is gone."""
        return self._dead

    def start(self, job: Job) -> Handle:
        """Ask for a worker; returns at once.

        Raises:
            LauncherLost: The zygote is gone.
        """
        log = Log(job)
        with self._lock:
            number = next(self._numbers)
            handle = self._handles[number] = ForkHandle(log)
            message = {
                "number": number,
                "request": str(job.request),
                "set": {k: v for k, v in job.environment.items() if self._environment.get(k) != v},
                "unset": [name for name in self._environment if name not in job.environment],
                "descriptors": list(job.descriptors),
            }
            try:
                if self._dead:
                    raise LauncherLost
                send_message(self._channel, message, [log.descriptor, *job.descriptors.values()])
            except OSError as error:
                raise LauncherLost from error
            finally:
                log.handed_over()
        return handle

    def close(self) -> None:
        """Let the zygote end; whatever it still runs is killed."""
        with self._lock:
            working = any(handle.working for handle in self._handles.values())
        if not working:
            # It need not finish its imports, and nobody is left for it to kill.
            self._process.kill()
        self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()

    def _listen(self) -> None:
        """Pass on what the zygote reports, until it is gone."""
        while (received := _next_message(self._channel)) is not None:
            message, _ = received
            handle = self._handles[message["number"]]
            if "code" in message:
                handle.ended(message["code"])
            else:
                handle.started(message["pid"])
        with self._lock:
            self._dead = True
            handles = list(self._handles.values())
        for handle in handles:
            handle.lost()


def _next_message(channel: socket.socket) -> tuple[dict[str, int], list[int]] | None:
    try:
        return receive_message(channel)
    except OSError:
        return None


class ForkHandle(Handle):
    """A worker that is a child of the zygote."""

    def __init__(self, log: Log) -> None:
        self.pid: int | None = None
        self._log = log
        self._code: int | None = None
        self._lost = False
        self._changed = threading.Condition()

    @property
    def working(self) -> bool:
        """Whether the worker was forked and its end is not known."""
        with self._changed:
            return self.pid is not None and self._code is None and not self._lost

    def started(self, pid: int) -> None:
        """The zygote forked; a worker that was cancelled meanwhile is killed."""
        with self._changed:
            self.pid = pid
            if self._code is not None:
                self._signal(signal.SIGKILL)
            self._changed.notify_all()

    def ended(self, code: int) -> None:
        """The zygote reaped the worker."""
        with self._changed:
            if self._code is None:
                self._code = code
            self._changed.notify_all()

    def lost(self) -> None:
        """The zygote is gone: nobody will report this worker's end."""
        with self._changed:
            self._lost = self._code is None
            self._changed.notify_all()

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or None while it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._code is not None or self._lost, timeout)
            code, lost = self._code, self._lost
        if code is None and not lost:
            return None
        if self.pid is not None:
            kill_group(self.pid)
        if lost and self.pid is not None:
            await_group_end(self.pid)
        self._log.finish()
        if code is None:
            raise LauncherLost
        return code

    def terminate(self) -> None:
        """Send one SIGTERM to the worker; one that the zygote has not forked yet will not run at all."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the group."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        with self._changed:
            if self._code is not None or self._lost:
                return
            if self.pid is None:
                self._code = -number
                self._changed.notify_all()
            else:
                self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            return
        if number == signal.SIGKILL:
            kill_group(self.pid)
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return  # it has just ended; the zygote's report is on its way


class Launchers:
    """Chooses a launcher for each worker: the zygote where it may fork, else a fresh interpreter.

    Args:
        preload: Modules that the forkable nodes of the run want.
        environment: The zygote's environment, without secrets.
        log: The zygote's output.
        note: Tells the run that the zygote was lost; never silent.
    """

    def __init__(
        self, preload: Sequence[str], environment: Mapping[str, str], log: Path, note: Callable[[str], None]
    ) -> None:
        self._preload = tuple(preload)
        self._environment = environment
        self._log = log
        self._note = note
        self._process = ProcessLauncher()
        self._zygote: ZygoteLauncher | None = None
        self._usable = bool(preload)
        self._lock = threading.Lock()

    @property
    def zygote(self) -> ZygoteLauncher | None:
        """The zygote, once it was started."""
        return self._zygote

    def warm(self) -> None:
        """Start the zygote in the background, so that its imports overlap with stages that need none."""
        with self._lock:
            if self._usable and self._zygote is None:
                try:
                    self._zygote = ZygoteLauncher(self._preload, self._environment, self._log)
                except OSError as error:
                    self._give_up(f"the preloaded interpreter did not start ({error})")

    def choose(self, job: Job) -> Launcher:
        """Return the launcher for a worker; the zygote is started at the latest for the first it may fork."""
        if not job.forkable:
            return self._process
        self.warm()
        with self._lock:
            if self._zygote is not None and self._usable and self._zygote.dead:
                self._give_up(f"the preloaded interpreter ended by itself (see {self._log})")
            if self._usable and self._zygote is not None:
                return self._zygote
        return self._process

    def lost(self) -> None:
        """A worker was lost with the zygote; from now on every worker gets a fresh interpreter."""
        with self._lock:
            self._give_up(f"the preloaded interpreter ended by itself (see {self._log})")

    def close(self) -> None:
        """End the zygote."""
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()

    def _give_up(self, reason: str) -> None:
        if self._usable:
            self._usable = False
            self._note(
                f"{reason}; stages start in fresh interpreters, which takes longer but changes no result"
            )
