"""How the ends of nodes and runs are shown in Prefect.

A gate's rejection and what it skips are no failures: they have the type COMPLETED under their own names. What
depends on a FAILED task is still asked (`allow_failure`), because the execution itself skips and journals it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from posttrain.contracts.runner import NodeResult, NodeStatus

TASK_STATES: Mapping[NodeStatus, tuple[str, str]] = MappingProxyType(
    {
        NodeStatus.COMPLETED: ("COMPLETED", "Completed"),
        NodeStatus.CACHED: ("COMPLETED", "Cached"),
        NodeStatus.REJECTED: ("COMPLETED", "Rejected"),
        NodeStatus.INCONCLUSIVE: ("COMPLETED", "Inconclusive"),
        NodeStatus.SKIPPED: ("COMPLETED", "Skipped"),
        NodeStatus.FAILED: ("FAILED", "Failed"),
        NodeStatus.INTERRUPTED: ("FAILED", "Interrupted"),
    }
)
"""Type and name of a task's final state."""

FLOW_STATES: tuple[tuple[NodeStatus, str, str], ...] = (
    (NodeStatus.FAILED, "FAILED", "Failed"),
    (NodeStatus.INTERRUPTED, "CANCELLED", "Interrupted"),
    (NodeStatus.REJECTED, "COMPLETED", "Rejected"),
    (NodeStatus.INCONCLUSIVE, "COMPLETED", "Inconclusive"),
)
"""Type and name of the flow's final state: the first row whose status a node has, else Completed."""


def task_state(result: NodeResult) -> tuple[str, str, str]:
    """Return type, name and message of a node's final state."""
    kind, name = TASK_STATES[result.status]
    message = str((result.error or {}).get("message") or result.summary)
    return kind, name, message


def flow_state(results: Iterable[NodeResult]) -> tuple[str, str, str]:
    """Return type, name and message of the run's final state."""
    by_status: dict[NodeStatus, list[str]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result.node)
    for status, kind, name in FLOW_STATES:
        if status in by_status:
            return kind, name, f"{status}: {', '.join(by_status[status])}"
    return "COMPLETED", "Completed", "every node passed"
