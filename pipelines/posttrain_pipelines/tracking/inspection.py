"""What a local tracking database lacks, found with read-only SQL and without MLflow."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from posttrain.artifacts.aliases import Aliases
from posttrain.execution.records import RunRecord
from posttrain_pipelines.tracking import watermark
from posttrain_pipelines.tracking.measures import Point, measures_of
from posttrain_pipelines.tracking.registry import VERSION
from posttrain_pipelines.tracking.runs import NODE, NODE_STATUS, RUN, RUN_STATUS
from posttrain_pipelines.tracking.tables import TAG, tables_of
from posttrain_pipelines.tracking.view import NodeView, RunView


@dataclass(frozen=True)
class _Row:
    """One run in the database."""

    id: str
    status: str
    tags: dict[str, str]


def identity(path: Path) -> str | None:
    """Return what tells a database from another one at the same place; None when there is none.

    It is the moment at which MLflow created the first experiment: inode numbers are used again.
    """
    if not path.is_file():
        return None
    state = path.stat()
    try:
        return _created(path, state.st_ino, state.st_ctime_ns)
    except sqlite3.DatabaseError:
        return None


@lru_cache(maxsize=4)
def _created(path: Path, inode: int, changed: int) -> str:
    """Read the identity, once for each state of the file."""
    with _reading(path) as database:
        found = database.execute("SELECT experiment_id, creation_time FROM experiments ORDER BY 1 LIMIT 1")
        return "-".join(str(value) for value in found.fetchone() or ())


def lacks(path: Path, workspace: Path, record: RunView, conflicts: Collection[tuple[str, ...]] = ()) -> bool:
    """Whether the database at `path` lacks something of a run; for the newest run, of the registry too.

    A database that is missing or has no schema yet lacks everything.

    Args:
        path: The database.
        workspace: The `.posttrain` directory.
        record: The run.
        conflicts: Names, aliases and versions that somebody else holds, as known already: they lack nothing.
    """
    if not path.is_file():
        return True
    with _reading(path) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"runs", "tags", "metrics", "registered_model_aliases"} <= tables:
            return True
        rows = _rows(database, record.run)
        parent = rows.get("")
        if parent is None or parent.status != RUN_STATUS[record.status]:
            return True
        stages = RunRecord(workspace, record.run)
        return any(
            node.tracked and _node_lacks(database, rows.get(node.node), node, stages.stage(node.node))
            for node in record.nodes.values()
        ) or (
            watermark.newest(workspace) == record.run
            and _registry_lacks(database, Aliases(workspace), conflicts)
        )


def _node_lacks(database: sqlite3.Connection, row: _Row | None, node: NodeView, directory: Path) -> bool:
    if (
        row is None
        or row.status != NODE_STATUS[node.status]
        or row.tags.get("posttrain.attempt") != str(node.attempt)
    ):
        return True
    missing_tags = any(
        row.tags.get(f"posttrain.output.{port}") != digest for port, digest in node.outputs.items()
    )
    tables = tables_of(directory, node)
    missing_tags |= any(f"{TAG}{name}" not in row.tags for name in tables)
    return missing_tags or not measures_of(directory, node).values.keys() <= _points(database, row.id)


def _registry_lacks(
    database: sqlite3.Connection, aliases: Aliases, conflicts: Collection[tuple[str, ...]]
) -> bool:
    versions = set(
        database.execute(
            "SELECT name, CAST(value AS INTEGER) FROM model_version_tags WHERE key = ?", (VERSION,)
        )
    )
    pointed = set(
        database.execute(
            "SELECT a.name, a.alias, CAST(t.value AS INTEGER) FROM registered_model_aliases a"
            " JOIN model_version_tags t ON t.name = a.name AND t.version = a.version AND t.key = ?",
            (VERSION,),
        )
    )
    wanted_versions = {(name, entry.version) for name in aliases.names() for entry in aliases.versions(name)}
    wanted = {
        (name, alias, version)
        for name in aliases.names()
        for alias, version in aliases.aliases(name).items()
        if (name, alias, str(version)) not in conflicts
    }
    return not (wanted_versions <= versions and wanted <= pointed)


def _rows(database: sqlite3.Connection, run: str) -> dict[str, _Row]:
    """Return the runs of `run` by node; the parent stands under the empty name."""
    found = database.execute(
        "SELECT r.run_uuid, r.status, t.key, t.value FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid"
        " WHERE r.lifecycle_stage = 'active' AND r.run_uuid IN"
        " (SELECT run_uuid FROM tags WHERE key = ? AND value = ?)",
        (RUN, run),
    )
    rows: dict[str, _Row] = {}
    for identity, status, key, value in found:
        rows.setdefault(identity, _Row(identity, status, {})).tags[key] = value
    return {row.tags.get(NODE, ""): row for row in rows.values()}


def _points(database: sqlite3.Connection, run: str) -> set[Point]:
    return set(database.execute("SELECT DISTINCT key, step FROM metrics WHERE run_uuid = ?", (run,)))


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0)) as database:
        yield database
