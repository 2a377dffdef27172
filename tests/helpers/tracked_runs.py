"""What MLflow's database holds of runs."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any


def client(workspace: Path) -> Any:
    from posttrain_pipelines.tracking.connection import connect

    return connect(workspace)


def by_node(workspace: Path, run: str = "r1") -> dict[str, Any]:
    """Return every MLflow run of `run` by node, refetched with inputs and outputs."""
    mlflow = client(workspace)
    experiments = [found.experiment_id for found in mlflow.search_experiments()]
    rows = mlflow.search_runs(experiments, f"tags.`posttrain.run` = '{run}'")
    names = Counter(row.data.tags.get("posttrain.node", "") for row in rows)
    assert set(names.values()) == {1}, names
    return {row.data.tags.get("posttrain.node", ""): mlflow.get_run(row.info.run_id) for row in rows}


def dump(workspace: Path) -> list[str]:
    with closing(sqlite3.connect(workspace / "mlflow.db")) as database:
        return list(database.iterdump())


def steps(workspace: Path, run: Any, key: str) -> list[tuple[int, float]]:
    history = client(workspace).get_metric_history(run.info.run_id, key)
    return sorted((entry.step, entry.value) for entry in history)
