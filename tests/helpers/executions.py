"""A stand-in for `PipelineRun`: performs nodes by a table and skips as the real one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.runs import SyntheticRun

from posttrain.contracts.runner import NodeResult, NodeStatus


class FakeExecution:
    """Performs each node once and remembers what it was asked.

    Args:
        workspace: The `.posttrain` directory.
        run: The run's id.
        dependencies: Dependencies by node, in order.
        statuses: How nodes end; `completed` when left out.
        act: Called while a node is performed.
    """

    spec_digest = "5" * 64
    stopping = False

    def __init__(
        self,
        workspace: Path,
        run: str,
        dependencies: Mapping[str, Sequence[str]],
        statuses: Mapping[str, str] | None = None,
        act: Callable[[str], None] = lambda node: None,
    ) -> None:
        self.workspace = workspace
        self.run = run
        self.order = list(dependencies)
        self.dependencies = dependencies
        self.notes: list[str] = []
        self.performed: list[str] = []
        self.results: dict[str, NodeResult] = {}
        self._statuses = statuses or {}
        self._act = act
        self._lock = threading.Lock()
        SyntheticRun(workspace, run, pipeline="tiny").begin()

    def perform(self, node: str) -> NodeResult:
        """Perform one node."""
        needed = [self.results[name] for name in self.dependencies[node]]
        with self._lock:
            self.performed.append(node)
        if all(result.status.passes for result in needed):
            self._act(node)
            status = NodeStatus(self._statuses.get(node, "completed"))
        else:
            status = NodeStatus.SKIPPED
        self.results[node] = NodeResult(node, status, summary=f"{node} ended")
        return self.results[node]

    def note(self, message: str) -> None:
        """Keep a note."""
        self.notes.append(message)
