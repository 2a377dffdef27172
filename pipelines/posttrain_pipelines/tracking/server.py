"""MLflow's page for the workspace's own database, on loopback."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from posttrain_pipelines.services import HOST, Service, ServiceSpec, ensure
from posttrain_pipelines.tracking.connection import (
    SETTINGS,
    connect,
    tracking_lock,
    tracking_uri,
    without_login,
)

NAME = "mlflow"


def configured_server() -> str | None:
    """Return the address, without a login, of a server that the user configured (`MLFLOW_TRACKING_URI`)."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return without_login(uri) if uri.startswith(("http://", "https://")) else None


def server_spec(workspace: Path) -> ServiceSpec:
    """Describe the server of a workspace."""
    return ServiceSpec(
        name=NAME,
        version=version("mlflow"),
        command=lambda port: [
            *(
                sys.executable,
                "-m",
                "mlflow",
                "server",
                "--host",
                HOST,
                "--port",
                str(port),
                "--workers",
                "1",
            ),
            *("--default-artifact-root", (workspace / "mlartifacts").as_uri()),
        ],
        environment=SETTINGS
        | {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            # by the environment, since everybody can read a command line, and it may hold a password
            "MLFLOW_BACKEND_STORE_URI": tracking_uri(workspace),
        },
        health="/health",
    )


def ensure_server(workspace: Path) -> Service:
    """Return the workspace's running server, started if need be, over a database that has its schema."""
    with tracking_lock(workspace):
        connect(workspace)
    return ensure(workspace, server_spec(workspace))
