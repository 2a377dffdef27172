"""Prefect as a library: it leaves the user's home, console and signals alone and sends nothing home."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.execution.environment import variables

LOGGERS = ("prefect", "prefect._internal", "httpx", "httpcore")
RETRIES = 2
"""Tries of a request to a server that is gone; Prefect's own five would hold up the end of a run for a minute."""
SILENT = logging.CRITICAL + 1


def load_prefect(workspace: Path) -> None:
    """Import Prefect with its home in the workspace; the environment is as before afterwards.

    Only telemetry stays off (`DO_NOT_TRACK`), because Prefect asks for it on every run.
    """
    home = workspace / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ["DO_NOT_TRACK"] = "1"
    for name in LOGGERS:
        logging.getLogger(name).addHandler(logging.NullHandler())
    with variables(
        {
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_LOGGING_SETTINGS_PATH": str(Path(__file__).with_name("logging.yml")),
        }
    ):
        import prefect  # noqa: F401


@contextmanager
def session(workspace: Path, url: str, token: str | None) -> Iterator[None]:
    """Talk to the server at `url`, silently.

    Args:
        workspace: The `.posttrain` directory.
        url: The address of the API.
        token: The local server's password; it gets no credentials of another one. None for a configured server,
            which gets those that the user configured.
    """
    from prefect import settings

    values: dict[Any, Any] = {
        settings.PREFECT_HOME: workspace / "prefect",
        settings.PREFECT_API_URL: url,
        settings.PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
        settings.PREFECT_LOGGING_TO_API_ENABLED: False,
        settings.PREFECT_LOGGING_LEVEL: "CRITICAL",
        settings.PREFECT_LOGGING_INTERNAL_LEVEL: "CRITICAL",
        settings.PREFECT_CLIENT_MAX_RETRIES: RETRIES,
        settings.PREFECT_RESULTS_PERSIST_BY_DEFAULT: False,
    }
    if token is not None:
        values |= {settings.PREFECT_API_KEY: None, settings.PREFECT_API_AUTH_STRING: token}
    with settings.temporary_settings(values), _silence():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(SILENT)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate


def end_earlier_runs(run: str) -> None:
    """Mark flow runs of an earlier process of `run` as crashed: it was killed and could not say so.

    Only one process at a time works on a run, so what is open now belongs to one that is gone.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.objects import State, StateType

    with get_client(sync_client=True) as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[run]))
        for found in client.read_flow_runs(flow_run_filter=named):
            if found.parameters.get("run") == run and not (found.state and found.state.is_final()):
                crashed = State[None](
                    type=StateType.CRASHED, name="Crashed", message="the process of the run is gone"
                )
                client.set_flow_run_state(found.id, crashed, force=True)
