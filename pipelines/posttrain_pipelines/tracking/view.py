"""A run as its journal tells it, in the shape that a tracker needs. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.contracts.runner import NodeStatus
from posttrain.errors import StoreError
from posttrain.execution.journal import NodeEnded, NodeStarted, RunEnded, RunStarted, read_journal
from posttrain.execution.records import RunRecord

RUNNING = "running"
KILLED = "killed"
"""The process of the run is gone and nothing says how the run ended."""


@dataclass(frozen=True)
class NodeView:
    """One node of a run: its last start and its last end.

    `attempts` are those of this run; `status` RUNNING means that no end is known yet.
    """

    node: str
    uses: str
    status: NodeStatus
    started: float
    key: str | None = None
    attempts: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, list[str]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    summary: str = ""
    error: Mapping[str, Any] | None = None
    ended: float | None = None

    @property
    def tracked(self) -> bool:
        """Whether there is anything to record: not for a node that was skipped or never began."""
        if self.status in (NodeStatus.SKIPPED, NodeStatus.PENDING):
            return False
        return bool(self.attempts) or self.status is not NodeStatus.INTERRUPTED

    @property
    def attempt(self) -> int:
        """The last attempt; 0 for a node that was taken from the cache."""
        return self.attempts[-1] if self.attempts else 0


@dataclass(frozen=True)
class RunView:
    """One run: `status` is that of its end, or `running` or `killed`."""

    run: str
    pipeline: str
    spec_digest: str
    runner: str
    status: str
    started: float
    ended: float | None
    nodes: Mapping[str, NodeView]


def view_run(workspace: Path, run: str) -> RunView:
    """Read the journal of `run`.

    Raises:
        StoreError: There is no journal, it is damaged, or it does not begin with the start of a run.
    """
    record = RunRecord(workspace, run)
    # Asked before the journal is read: a run that ends in between then shows its end, never as killed.
    live = record.live
    first: RunStarted | None = None
    last: RunStarted | None = None
    end: RunEnded | None = None
    nodes: dict[str, NodeView] = {}
    for entry in read_journal(record.directory):
        match entry:
            case RunStarted():
                first, last, end = first or entry, entry, None
                nodes = _abandon(nodes, entry.time)
            case NodeStarted():
                nodes[entry.node] = _start(nodes.get(entry.node), entry)
            case NodeEnded():
                nodes[entry.node] = _end(nodes.get(entry.node), entry)
            case RunEnded():
                end = entry
    if first is None or last is None:
        raise StoreError("this run's journal is empty", where=str(record.directory))
    status = end.status if end else RUNNING if live else KILLED
    if status != RUNNING:
        nodes = _abandon(nodes, end.time if end else _latest(nodes, last.time))
    return RunView(
        run=run,
        pipeline=first.pipeline,
        spec_digest=last.spec_digest,
        runner=last.runner,
        status=status,
        started=first.time,
        ended=None if status == RUNNING else end.time if end else _latest(nodes, last.time),
        nodes=nodes,
    )


def _start(before: NodeView | None, entry: NodeStarted) -> NodeView:
    return NodeView(
        node=entry.node,
        uses=entry.uses,
        status=NodeStatus.RUNNING,
        started=before.started if before else entry.time,
        key=entry.key,
        attempts=(*(before.attempts if before else ()), entry.attempt),
        config=entry.config,
        inputs=entry.inputs,
    )


def _end(before: NodeView | None, entry: NodeEnded) -> NodeView:
    if before is not None and before.attempts and entry.attempt is None:
        reused = entry.status is NodeStatus.CACHED and before.status.passes
        untouched = entry.status in (NodeStatus.SKIPPED, NodeStatus.INTERRUPTED)
        if reused or untouched:
            return before  # a resumed run finds, or leaves, what this very run did earlier
    base = before or NodeView(entry.node, entry.uses, entry.status, entry.time - entry.seconds)
    return replace(
        base,
        uses=entry.uses,
        status=entry.status,
        key=entry.key or base.key,
        config=entry.config or base.config,
        inputs=entry.inputs or base.inputs,
        outputs=entry.outputs,
        figures=entry.figures,
        summary=entry.summary,
        error=entry.error,
        ended=entry.time,
    )


def _abandon(nodes: Mapping[str, NodeView], moment: float) -> dict[str, NodeView]:
    """End the nodes that are still open: their process is gone."""
    return {
        name: replace(node, status=NodeStatus.INTERRUPTED, ended=moment)
        if node.status is NodeStatus.RUNNING
        else node
        for name, node in nodes.items()
    }


def _latest(nodes: Mapping[str, NodeView], moment: float) -> float:
    return max([moment, *(node.ended or node.started for node in nodes.values())])
