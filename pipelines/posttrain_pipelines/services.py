"""Local servers of one workspace: started detached on loopback and recorded in `services/*.json`."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from posttrain.artifacts.files import write_durably
from posttrain.artifacts.locks import KeyLock, acquire, attempt
from posttrain.errors import PosttrainError
from posttrain.execution.processes import alive, group_alive, start_time, terminate

HOST = "127.0.0.1"
KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
)
"""All that a server inherits of the environment, so that it holds no secret."""
TRIES = 3
"""A free port may be taken by another process before the server binds it."""
PATIENCE = 60.0
"""Seconds for which a living server may be silent, on a machine that is busy, before it is replaced."""
_PAUSE = 0.1


class ServiceError(PosttrainError):
    """A local server did not start."""


@dataclass(frozen=True)
class ServiceSpec:
    """How to start one kind of server.

    Args:
        name: Names the record and the log.
        version: A running server of another version is replaced.
        command: The command line for a port.
        environment: Variables added to the few that are inherited.
        health: The path that answers 200 once the server is up.
        path: What is appended to the address that people and clients use.
        patience: Seconds to wait for the first healthy answer.
    """

    name: str
    version: str
    command: Callable[[int], list[str]]
    environment: Mapping[str, str]
    health: str
    path: str = ""
    patience: float = 180.0


@dataclass(frozen=True)
class Service:
    """A server that was started; `started` is what `start_time` says of its process."""

    name: str
    url: str
    pid: int
    started: float
    version: str

    @property
    def alive(self) -> bool:
        """Whether the very process still runs."""
        return alive(self.pid, self.started)

    @property
    def remains(self) -> bool:
        """Whether the process or a process that it started still runs."""
        return group_alive(self.pid, self.started)


def ensure(
    workspace: Path,
    spec: ServiceSpec,
    *,
    stopping: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda message: None,
) -> Service:
    """Return the running server, or start one. Two callers at once get the same server.

    Args:
        workspace: The `.posttrain` directory.
        spec: The server.
        stopping: Asked while waiting; once it is true, waiting ends.
        note: Told when a record cannot be read.

    Raises:
        ServiceError: It ended by itself, did not answer in time, or waiting was ended.
    """
    directory = workspace / "services"
    with _acquire(directory / f"{spec.name}.lock", spec, stopping):
        record = directory / f"{spec.name}.json"
        known = _read(record)
        if known is None and record.exists():
            note(
                f"the record of the local {spec.name} server cannot be read ({record}): starting another one"
            )
        if known and known.version == spec.version and _still_answers(known, spec, stopping):
            return known
        if known:
            terminate(known.pid, known.started)
        service = _start(directory, spec, stopping)
        write_durably(record, json.dumps(asdict(service), indent=2).encode() + b"\n")
        return service


def recorded(workspace: Path) -> dict[str, Service]:
    """Return the servers on record by name, dead or alive; a record that cannot be read counts as none."""
    records = sorted((workspace / "services").glob("*.json"))
    return {record.stem: service for record in records if (service := _read(record)) is not None}


def stop(workspace: Path) -> list[Service]:
    """Stop every recorded server of the workspace and return those of which something was running.

    The record of a server that cannot be ended stays.
    """
    stopped = []
    for record in sorted((workspace / "services").glob("*.json")):
        with acquire(record.with_suffix(".lock")):
            service = _read(record)
            if service is not None and service.remains:
                terminate(service.pid, service.started)
                stopped.append(service)
            if service is None or not service.remains:
                record.unlink(missing_ok=True)
    return stopped


def _read(record: Path) -> Service | None:
    """Return the server on record. None: there is no record, or none that can be trusted with a pid."""
    try:
        service = TypeAdapter(Service).validate_json(record.read_bytes(), strict=True)
    except (FileNotFoundError, ValidationError):
        return None
    return service if service.pid > 1 else None


def _acquire(path: Path, spec: ServiceSpec, stopping: Callable[[], bool]) -> KeyLock:
    while (lock := attempt(path)) is None:
        _go_on(spec, stopping)
        time.sleep(_PAUSE)
    return lock


def _go_on(spec: ServiceSpec, stopping: Callable[[], bool]) -> None:
    if stopping():
        raise ServiceError(f"the run was stopped while the local {spec.name} server was not up yet")


def _still_answers(service: Service, spec: ServiceSpec, stopping: Callable[[], bool]) -> bool:
    """Whether a server that was up once still is: silence counts only when it lasts or the process is gone."""
    deadline = time.monotonic() + PATIENCE
    while service.alive:
        if healthy(service, spec):
            return True
        if time.monotonic() > deadline:
            return False
        _go_on(spec, stopping)
        time.sleep(_PAUSE)
    return False


def healthy(service: Service, spec: ServiceSpec) -> bool:
    """Whether the server answers."""
    base = service.url.removesuffix(spec.path)
    return answers(base + spec.health)


def answers(url: str, timeout: float = 5.0) -> bool:
    """Whether a GET of `url` is answered with 200. No proxy is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _start(directory: Path, spec: ServiceSpec, stopping: Callable[[], bool]) -> Service:
    log = directory / f"{spec.name}.log"
    for _ in range(TRIES):
        port = _free_port()
        service = _launch(log, spec, port)
        if service and _wait(service, spec, stopping):
            return service
    raise ServiceError(
        f"the local {spec.name} server did not start",
        where=str(log),
        found=_last_line(log),
        expected=f"an answer from {spec.health} within {spec.patience:.0f} s",
        fix=f"read {log}; `posttrain down` clears what is left of an old server",
    )


def _launch(log: Path, spec: ServiceSpec, port: int) -> Service | None:
    """Start the server in a session of its own, with nothing of ours but a few variables."""
    command = spec.command(port)
    inherited = {name: os.environ[name] for name in KEPT if name in os.environ}
    pid = os.posix_spawn(
        command[0],
        command,
        {**inherited, **spec.environment},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
    )
    started = start_time(pid)
    if started is None:
        return None
    return Service(spec.name, f"http://{HOST}:{port}{spec.path}", pid, started, spec.version)


def _wait(service: Service, spec: ServiceSpec, stopping: Callable[[], bool]) -> bool:
    """Wait for health. False: the process ended by itself. A server that never came up is ended."""
    deadline = time.monotonic() + spec.patience
    try:
        while time.monotonic() < deadline:
            if not service.alive:
                return False
            if healthy(service, spec):
                return True
            _go_on(spec, stopping)
            time.sleep(_PAUSE)
    except BaseException:
        terminate(service.pid, service.started)
        raise
    terminate(service.pid, service.started)
    raise ServiceError(
        f"the local {service.name} server does not answer",
        where=service.url,
        expected=f"an answer within {spec.patience:.0f} s",
        fix="try again on a quieter machine, or use `--runner sequential`",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "an empty log"
