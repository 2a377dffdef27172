"""How MLflow is reached: explicit addresses, one schema, no telemetry, no global state."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.locks import KeyLock, acquire
from posttrain.artifacts.manifest import digest_of
from posttrain.errors import StoreError
from posttrain.planning.secrets import Redactor
from posttrain_pipelines.extras import require

if TYPE_CHECKING:
    from mlflow.tracking.client import MlflowClient

SETTINGS = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
}
"""Environment of every process in which MLflow runs."""

IMPATIENCE = MappingProxyType({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"})
"""How long a server may take, unless the user says otherwise. MLflow's own 7 tries of 120 s would hold up the end
of a run for minutes; what did not get through is replayed later."""

_SQLITE = "sqlite:///"


def database(workspace: Path) -> Path:
    """Return the workspace's own database."""
    return workspace / "mlflow.db"


def tracking_uri(workspace: Path) -> str:
    """Return where runs are recorded: `MLFLOW_TRACKING_URI` if it is set, else the workspace's database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{database(workspace)}"


def without_login(uri: str) -> str:
    """Return an address without the user and the password in it."""
    head, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{head}{separator}{host.rpartition('@')[2]}{slash}{path}"


def store_identity(uri: str) -> str:
    """Return what tells tracking stores apart and may be written down: an address may hold a password."""
    return digest_of(without_login(uri))


def sqlite_path(uri: str) -> Path | None:
    """Return the file behind a SQLite address; None for any other store."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0])


def tracking_lock(workspace: Path) -> KeyLock:
    """Take the right to write: MLflow creates its schema without a lock and keeps no tag unique."""
    path = sqlite_path(tracking_uri(workspace)) or database(workspace)
    return acquire(path.with_name(path.name + ".lock"))


def connect(workspace: Path) -> MlflowClient:
    """Return a client; creates the schema of a new database. Call it while holding `tracking_lock`.

    Raises:
        StoreError: The database is locked, read-only or no database.
    """
    uri = tracking_uri(workspace)
    path = sqlite_path(uri)
    if path is not None:
        _probe(path)
        if not path.stat().st_size:
            _create(path)
    return _opened(uri, os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def _opened(uri: str, registry_uri: str) -> MlflowClient:
    """Return a client whose stores are open. MLflow opens them, and creates their schema, at the first call."""
    with speaking(uri), _quiet():
        from mlflow.tracking.client import MlflowClient

        client = MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
        client.search_experiments(max_results=1)
        client.search_registered_models(max_results=1)
        return client


def _create(path: Path) -> None:
    """Create a database with its schema, whole or not at all.

    MLflow commits table by table and cannot go on with a schema that a kill left unfinished. So the schema is
    made under another name, copied (MLflow keeps the one it made open) and the copy renamed.
    """
    directory = path.with_name(f".{path.name}.new")
    shutil.rmtree(directory, ignore_errors=True)  # what a kill left
    directory.mkdir()
    first, copy = directory / "first.db", directory / "copy.db"
    uri = f"{_SQLITE}{first}"
    _opened(uri, uri)
    with closing(sqlite3.connect(first)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    copy.replace(path)
    shutil.rmtree(directory)


def load_mlflow() -> Any:
    """Import MLflow with telemetry and the loading of pickles switched off."""
    require("mlflow")
    os.environ.update(SETTINGS)
    for name, value in IMPATIENCE.items():
        os.environ.setdefault(name, value)
    import mlflow

    return mlflow


@contextmanager
def speaking(uri: str) -> Iterator[None]:
    """Turn an error of MLflow, whose text may hold the address with its password, into one that does not.

    Raises:
        StoreError: MLflow could not be reached, or refused.
    """
    load_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(
            "MLflow did not answer or refused",
            where=without_login(uri),
            found=Redactor([]).text(lines[0]),
            fix="`posttrain sync` adds what is missing once it can",
        ) from None


def _probe(path: Path) -> None:
    """Find out within seconds what MLflow would find out after many retries."""
    try:
        with closing(sqlite3.connect(path, timeout=5.0, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise StoreError(
            "the MLflow database cannot be written",
            where=str(path),
            found=error,
            fix="`posttrain sync` adds what is missing once it can",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notices about a new schema off the terminal."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
