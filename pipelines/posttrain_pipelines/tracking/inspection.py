"""What a local tracking database lacks, found with read-only SQL and without MLflow."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from posttrain.artifacts.aliases import Aliases
from posttrain.execution.records import RunRecord, list_runs
from posttrain_pipelines.tracking.measures import Point, measures_of
from posttrain_pipelines.tracking.registry import VERSION
from posttrain_pipelines.tracking.runs import NODE, NODE_STATUS, RUN, RUN_STATUS
from posttrain_pipelines.tracking.view import NodeView, RunView


@dataclass(frozen=True)
class _Row:
    """One run in the database."""

    id: str
    status: str
    tags: dict[str, str]


def lacks(path: Path, workspace: Path, record: RunView) -> bool:
    """Whether the database at `path` lacks something of a run; for the newest run, of the registry too.

    A database that is missing or has no schema yet lacks everything.
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
        ) or (_newest(workspace, record.run) and _registry_lacks(database, Aliases(workspace)))


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
    return missing_tags or not measures_of(directory, node).values.keys() <= _points(database, row.id)


def _newest(workspace: Path, run: str) -> bool:
    """Whether `run` is the newest one, which answers for the registry of the workspace."""
    return list_runs(workspace)[-1].run == run


def _registry_lacks(database: sqlite3.Connection, aliases: Aliases) -> bool:
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
        (name, alias, version) for name in aliases.names() for alias, version in aliases.aliases(name).items()
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
