"""The core's own runner: one node after the other. What does not depend on a failure still runs."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.contracts.runner import Execution, NodeResult


class SequentialRunner:
    """Performs the nodes in topological order; `perform` itself skips what a failure blocks."""

    def run(self, execution: Execution) -> Mapping[str, NodeResult]:
        """Perform every node."""
        return {node: execution.perform(node) for node in execution.order}
