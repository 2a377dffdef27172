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

from posttrain.artifacts.files import write_durably
from posttrain.artifacts.locks import acquire
from posttrain.errors import PosttrainError
from posttrain_pipelines.processes import alive, start_time, terminate

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
    """A server that was started; `started` is the start time of its process in seconds since the epoch."""

    name: str
    url: str
    pid: int
    started: float
    version: str

    @property
    def alive(self) -> bool:
        """Whether the very process still runs."""
        return alive(self.pid, self.started)


def ensure(workspace: Path, spec: ServiceSpec) -> Service:
    """Return the running server, or start one. Two callers at once get the same server.

    Raises:
        ServiceError: It ended by itself or did not answer in time.
    """
    directory = workspace / "services"
    with acquire(directory / f"{spec.name}.lock"):
        known = recorded(workspace).get(spec.name)
        if known and known.alive and known.version == spec.version and healthy(known, spec):
            return known
        if known:
            terminate(known.pid, known.started)
        service = _start(directory, spec)
        write_durably(directory / f"{spec.name}.json", json.dumps(asdict(service), indent=2).encode() + b"\n")
        return service


def recorded(workspace: Path) -> dict[str, Service]:
    """Return the servers on record by name, dead or alive."""
    records = sorted((workspace / "services").glob("*.json"))
    return {record.stem: Service(**json.loads(record.read_text())) for record in records}


def stop(workspace: Path) -> list[Service]:
    """Stop every recorded server of the workspace and return those that were running."""
    stopped = []
    for name, service in recorded(workspace).items():
        with acquire(workspace / "services" / f"{name}.lock"):
            if service.alive:
                terminate(service.pid, service.started)
                stopped.append(service)
            (workspace / "services" / f"{name}.json").unlink(missing_ok=True)
    return stopped


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


def _start(directory: Path, spec: ServiceSpec) -> Service:
    log = directory / f"{spec.name}.log"
    for _ in range(TRIES):
        port = _free_port()
        service = _launch(log, spec, port)
        if service and _wait(service, spec):
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


def _wait(service: Service, spec: ServiceSpec) -> bool:
    """Wait for health. False: the process ended by itself. A server that hangs is ended and raises."""
    deadline = time.monotonic() + spec.patience
    while time.monotonic() < deadline:
        if not service.alive:
            return False
        if healthy(service, spec):
            return True
        time.sleep(0.1)
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
