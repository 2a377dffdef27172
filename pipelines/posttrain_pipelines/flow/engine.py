"""Prefect as a library: it leaves the user's home, console and signals alone and sends nothing home."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.execution.environment import variables

LOGGERS = ("prefect", "prefect._internal", "httpx", "httpcore")
RETRIES = 2
"""Tries of a request to a server that is gone; Prefect's own five would hold up the end of a run for a minute."""
SILENT = logging.CRITICAL + 1


def load_prefect(workspace: Path) -> ModuleType:
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
        import prefect

        return prefect


@contextmanager
def session(workspace: Path, url: str, local: bool) -> Iterator[None]:
    """Talk to the server at `url`, silently. A local server gets no credentials of another one."""
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
    if local:
        values |= {settings.PREFECT_API_KEY: None, settings.PREFECT_API_AUTH_STRING: None}
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
