"""The zygote: an interpreter that has imported the heavy libraries once and forks a worker for each request.

`python -m posttrain.execution.zygote DESCRIPTOR MODULE…`, started by `posttrain.execution.fork`. It holds no
secrets, starts no threads and computes nothing, so that a fork is as good as a fresh interpreter. It talks to
the parent over one socket: messages are JSON with a length in front; a request carries its descriptors. When
the parent's end closes, it kills its workers and ends. Requests that arrive before it is ready wait there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.execution import worker
from posttrain.execution.liveness import kill_group
from posttrain.execution.machine import uncollected

MODULE = "posttrain.execution.zygote"
_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 8


def send_message(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message, with copies of open descriptors."""
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(body)


def receive_message(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors, or None when the other end is closed."""
    header, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
    header += _receive(channel, _LENGTH.size - len(header)) if header else b""
    if len(header) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(header)[0]
    body = _receive(channel, size)
    return (json.loads(body), descriptors) if len(body) == size else None


def _receive(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            break
        parts += part
    return parts


def main(argv: Sequence[str]) -> int:
    """Preload the modules and serve until the parent is gone."""
    channel = socket.socket(fileno=int(argv[0]))
    with uncollected():
        for name in argv[1:]:
            importlib.import_module(name)
    if _threads() > 1:
        sys.stderr.write(f"one of {', '.join(argv[1:])} started threads, so forking would not be safe\n")
        return 1
    # What exists now is never collected in a worker, so that collections there do not touch shared pages.
    gc.freeze()
    return _Server(channel).serve()


def _threads() -> int:
    """Return the number of threads of this process, native ones included where the system tells."""
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else threading.active_count()


class _Server:
    """Forks on request, reaps, and reports."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._workers: dict[int, int] = {}
        """Request number by process id."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    def serve(self) -> int:
        """Serve until the parent's end of the socket is closed."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake)
        while True:
            ready, _, _ = select.select([self._channel.fileno(), self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._channel.fileno() in ready:
                received = receive_message(self._channel)
                if received is None:
                    break
                self._fork(*received)
        for pid in self._workers:
            kill_group(pid)
        return 0

    def _fork(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers[pid] = message["number"]
        self._tell({"number": message["number"], "pid": pid})

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self._tell({"number": self._workers.pop(pid), "pid": pid, "code": code})

    def _tell(self, message: Mapping[str, Any]) -> None:
        # A parent that is gone shows as the closed channel in `serve`.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_message(self._channel, message)

    def _become_worker(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
        """Turn this forked process into a worker. It never returns into the loop of the zygote."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.close(self._woken)
            os.close(self._wake)
            _take_place(message, descriptors)
            code = worker.main([message["request"]])
        except BaseException:  # noqa: BLE001 - whatever it is, it must end here, and be seen
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            # What cannot be printed, on a full disk say, must not keep a worker alive in the zygote's own loop.
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _take_place(message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Take over output and environment of the request; the worker takes its number of threads from there."""
    log, *named = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for name in message["unset"]:
        del os.environ[name]
    os.environ.update(message["set"])
    os.environ.update({name: str(number) for name, number in zip(message["descriptors"], named, strict=True)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
