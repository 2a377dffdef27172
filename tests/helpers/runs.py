"""Synthetic runs: journals and event streams as the execution would write them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.stores import write

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts, ReportFacts
from posttrain.artifacts.manifest import Artifact, Provenance
from posttrain.artifacts.store import Store
from posttrain.contracts.runner import NodeStatus
from posttrain.execution.journal import NodeEnded, NodeStarted, RunEnded, RunStarted
from posttrain.execution.protocol import Metrics
from posttrain.execution.records import RunRecord

FACTS: Mapping[Kind, Any] = {
    Kind.DATASET: DatasetFacts(format="text", rows=1),
    Kind.MODEL: PolicyFacts(architecture="tiny"),
    Kind.REPORT: ReportFacts(report="evaluation"),
}


def artifact(
    workspace: Path, node: str, port: str, kind: Kind, content: str, run: str = "r1", facts: Any = None
) -> Artifact:
    """Commit a one-file artifact."""
    store = Store(workspace)
    directory = write(store.scratch(node), {"payload.txt": content.encode()})
    store.seal(directory, kind, facts or FACTS[kind])
    made_by = Provenance(
        stage="test", node=node, port=port, key="k", run=run, parents={}, created="2025-01-02T03:04:05Z"
    )
    return store.commit(directory, made_by)


class SyntheticRun:
    """Writes one run's record step by step."""

    def __init__(self, workspace: Path, run: str = "r1", pipeline: str = "tiny") -> None:
        self.workspace = workspace
        self.run = run
        self.pipeline = pipeline
        self.record = RunRecord(workspace, run)
        self.record.directory.mkdir(parents=True, exist_ok=True)

    def begin(self, resumed: bool = False) -> None:
        self.record.journal.append(
            RunStarted(
                run=self.run,
                pipeline=self.pipeline,
                spec_digest="5" * 64,
                runner="sequential",
                pid=os.getpid(),
                resumed=resumed,
            )
        )

    def start(
        self,
        node: str,
        attempt: int = 1,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, list[str]] | None = None,
    ) -> None:
        (self.record.stage(node) / str(attempt)).mkdir(parents=True)
        self.record.journal.append(
            NodeStarted(
                node=node,
                uses=f"test.{node}",
                key=f"key-{node}",
                attempt=attempt,
                config=dict(config or {}),
                inputs=dict(inputs or {}),
            )
        )

    def metrics(self, node: str, step: int, attempt: int = 1, **values: float) -> None:
        event = Metrics(time=time.time(), step=step, values=values)
        with (self.record.stage(node) / str(attempt) / "events.jsonl").open("ab") as file:
            file.write(event.model_dump_json().encode() + b"\n")

    def end(self, node: str, status: str = "completed", attempt: int | None = 1, **parts: Any) -> None:
        self.record.journal.append(
            NodeEnded(
                node=node,
                uses=f"test.{node}",
                key=f"key-{node}",
                attempt=attempt,
                status=NodeStatus(status),
                **parts,
            )
        )

    def finish(self, status: str = "completed") -> None:
        self.record.journal.append(RunEnded(status=status))


def sft_and_dpo(workspace: Path) -> SyntheticRun:
    """Write a completed run: `data` makes a dataset, `sft` a model of it, `dpo` another model."""
    rows = artifact(workspace, "data", "train", Kind.DATASET, "rows")
    first = artifact(workspace, "sft", "model", Kind.MODEL, "first")
    second = artifact(workspace, "dpo", "model", Kind.MODEL, "second")
    run = SyntheticRun(workspace)
    run.begin()
    run.start("data", config={"path": "rows.jsonl"})
    run.end("data", outputs={"train": rows.digest})
    run.start("sft", config={"learning_rate": 1e-3, "loss": {"name": "nll"}}, inputs={"data": [rows.digest]})
    for step in range(1, 4):
        run.metrics("sft", step, loss=1.0 / step, **{"grad norm": 2.0})
    run.end("sft", outputs={"model": first.digest}, figures={"loss": 0.25}, summary="3 steps")
    run.start("dpo", inputs={"model": [first.digest], "data": [rows.digest]})
    run.end("dpo", outputs={"model": second.digest})
    run.finish()
    return run
