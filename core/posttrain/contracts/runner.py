"""The runner contract: order and concurrency of a run's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol


class NodeStatus(StrEnum):
    """How a node of a run stands or ended."""

    PENDING = "pending"
    RUNNING = "running"
    CACHED = "cached"
    COMPLETED = "completed"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    SKIPPED = "skipped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def passes(self) -> bool:
        """Whether what depends on the node may run."""
        return self in (NodeStatus.CACHED, NodeStatus.COMPLETED)


@dataclass(frozen=True)
class NodeResult:
    """The end of one node in one run."""

    node: str
    status: NodeStatus
    outputs: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    summary: str = ""
    error: Mapping[str, Any] | None = None


class Execution(Protocol):
    """What a runner is given: the nodes of one run, and the one call that performs a node."""

    run: str
    workspace: Path
    spec_digest: str
    order: Sequence[str]
    """Node names, every node after what it depends on."""
    dependencies: Mapping[str, Sequence[str]]

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop; nodes that are performed from now on end as interrupted."""

    def perform(self, node: str) -> NodeResult:
        """Bind, reuse or run one node, journal it, and return its end. Never raises for a stage's own failure.

        Skips the node by itself when a dependency did not pass; waits for `resources`. Safe to call from several
        threads for different nodes.
        """

    def note(self, message: str) -> None:
        """Tell the person who watches something about the run."""


class Runner(Protocol):
    """Registered under `Group.RUNNER` as a class. Calls `perform` for every node, respecting the dependencies."""

    def run(self, execution: Execution) -> Mapping[str, NodeResult]:
        """Perform every node and return all results; raise for nothing but the runner's own failure."""
