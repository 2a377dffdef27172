"""The workspace's own Prefect server: one process on loopback with its home in `.posttrain/prefect`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

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
    """Return the address that the user configured (`PREFECT_API_URL`); it replaces the local server."""
    return os.environ.get("PREFECT_API_URL") or None


def server_spec(workspace: Path) -> ServiceSpec:
    """Describe the server of a workspace."""
    home = workspace / "prefect"
    return ServiceSpec(
        name=NAME,
        version=version("prefect"),
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
            "DO_NOT_TRACK": "1",
            **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in IDLE_SERVICES},
        },
        health="/api/health",
        path="/api",
    )


def ensure_server(workspace: Path) -> Service:
    """Return the workspace's running server, started if need be."""
    (workspace / "prefect").mkdir(parents=True, exist_ok=True)
    return ensure(workspace, server_spec(workspace))
