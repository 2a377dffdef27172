"""The workspace's own Prefect server: one process on loopback with its home in `.posttrain/prefect`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from posttrain.artifacts.locks import acquire
from posttrain.errors import SpecError
from posttrain_pipelines.services import HOST, Service, ServiceSpec, ensure

NAME = "prefect"
IDLE_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "CANCELLATION_CLEANUP",
    "FOREMAN",
    "REPOSSESSOR",
    "TRIGGERS",
)
"""Background services without work here. The event services stay: they write task runs to the database."""


def configured_api() -> str | None:
    """Return the address that the user configured (`PREFECT_API_URL`); it replaces the local server.

    Raises:
        SpecError: It is no address.
    """
    address = os.environ.get("PREFECT_API_URL") or None
    if address is not None and not address.startswith(("http://", "https://")):
        raise SpecError(
            "this is no address of a Prefect server",
            where="PREFECT_API_URL",
            found=address,
            expected="something like http://127.0.0.1:4200/api",
            fix="correct the variable, or unset it for a local server",
        )
    return address


def token_file(workspace: Path) -> Path:
    """Return the file with the password of the workspace's server."""
    return workspace / "services" / f"{NAME}.token"


def token(workspace: Path) -> str:
    """Return the password of the workspace's server; made when there is none, for this user's eyes only."""
    path = token_file(workspace)
    with acquire(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"posttrain:{secrets.token_urlsafe(24)}\n")
            draft.replace(path)
    return path.read_text(encoding="ascii").strip()


def server_spec(workspace: Path) -> ServiceSpec:
    """Describe the server of a workspace."""
    home, password = workspace / "prefect", token(workspace)
    return ServiceSpec(
        name=NAME,
        version=f"{version('prefect')}+token",
        command=lambda port: [
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", HOST, "--port", str(port)),
        ],
        environment={
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_UI_STATIC_DIRECTORY": str(home / "ui"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_SERVER_API_AUTH_STRING": password,
            "PREFECT_API_AUTH_STRING": password,
            "DO_NOT_TRACK": "1",
            **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in IDLE_SERVICES},
        },
        health="/api/health",
        path="/api",
    )


def ensure_server(
    workspace: Path,
    *,
    stopping: Callable[[], bool] = lambda: False,
    note: Callable[[str], None] = lambda message: None,
) -> Service:
    """Return the workspace's running server, started if need be; the arguments are those of `ensure`."""
    (workspace / "prefect").mkdir(parents=True, exist_ok=True)
    return ensure(workspace, server_spec(workspace), stopping=stopping, note=note)
