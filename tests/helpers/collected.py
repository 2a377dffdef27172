"""Stores of which something is superfluous."""

from __future__ import annotations

import os
from pathlib import Path

from helpers.stores import commit, key_record

from posttrain.artifacts.gc import GcReport
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.execution.journal import Journal, NodeEnded, RunEnded, RunStarted


def dataset(store: Store, content: str) -> Artifact:
    return commit(store, {"rows.jsonl": content.encode()})


def start(store: Store, run: str) -> Journal:
    directory = store.workspace / "runs" / run
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory)
    journal.append(RunStarted(run=run, pipeline="p", spec_digest="0", runner="sequential", pid=1))
    return journal


def node_ended(
    key: str | None, outputs: dict[str, str], inputs: dict[str, list[str]] | None = None
) -> NodeEnded:
    return NodeEnded(node="n", uses="u", key=key, status="completed", outputs=outputs, inputs=inputs or {})


def finished(store: Store, run: str, key: str, *outputs: Artifact) -> None:
    journal = start(store, run)
    ports = {f"p{number}": artifact.digest for number, artifact in enumerate(outputs)}
    store.record(key_record(key, ports))
    journal.append(node_ended(key, ports))
    journal.append(RunEnded(status="completed"))


def names(report: GcReport, part: str) -> set[str]:
    return {item.name for item in getattr(report, part)}


def age(path: Path) -> None:
    os.utime(path, (1_000_000_000, 1_000_000_000))
