"""The tables of one node, such as sampled completions, as files that MLflow shows. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.execution.journal import events_of
from posttrain_pipelines.tracking.view import NodeView

TAG = "posttrain.table."
"""What begins the names of the tags that say which state of a table is there."""
FOLDER = "tables"
SHOWN = "mlflow.loggedArtifacts"
"""The tag by which MLflow knows which artifacts are tables."""

Rows = list[Mapping[str, Any]]


def tables_of(directory: Path, node: NodeView) -> dict[str, Rows]:
    """Collect a node's tables by name. Where a resumed attempt repeats a step, the later attempt counts.

    Args:
        directory: The node's directory, with one for each attempt.
        node: The node.
    """
    found: dict[str, dict[int, Rows]] = {}
    for attempt in sorted(set(node.attempts)):
        for event in events_of(directory / str(attempt), "table"):
            rows: Rows = [{"step": event["step"], **row} for row in event["rows"]]
            found.setdefault(event["name"], {})[event["step"]] = rows
    return {name: [row for step in sorted(steps) for row in steps[step]] for name, steps in found.items()}


def table_text(rows: Rows) -> str:
    """Return rows in the form that MLflow's tables have."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return json.dumps({"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]})


def table_tags(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Return the tags that say which state of each table is there."""
    return {
        f"{TAG}{name}": hashlib.sha256(table_text(rows).encode()).hexdigest() for name, rows in tables.items()
    }


def table_path(name: str) -> str:
    """Return where a table lies among a run's artifacts."""
    return f"{FOLDER}/{name}.json"
