"""Building a node: resources, a worker, its supervision and its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.files import write_durably
from posttrain.artifacts.locks import KeyLock
from posttrain.artifacts.store import Store
from posttrain.execution.attempt import Attempt, Tail, judge, supervise
from posttrain.execution.binding import Bound, declared_secrets
from posttrain.execution.environment import with_posttrain, worker_environment
from posttrain.execution.fork import Launchers
from posttrain.execution.journal import NodeStarted
from posttrain.execution.launch import InlineLauncher, Job, LauncherLost
from posttrain.execution.liveness import Lifeline
from posttrain.execution.protocol import LIVENESS_FD, LOCK_FD, Request, Result
from posttrain.execution.records import RunRecord
from posttrain.execution.resources import Demand, Grant, Pool
from posttrain.execution.signals import Stop
from posttrain.planning.graph import Graph, Node
from posttrain.planning.secrets import Redactor


@dataclass(frozen=True)
class Builder:
    """Everything the nodes of one run share while they are built; `PipelineRun` makes it."""

    graph: Graph
    store: Store
    record: RunRecord
    plugins: Sequence[str]
    pool: Pool
    launchers: Launchers
    inline: InlineLauncher | None
    lifeline: Lifeline
    stop: Stop
    grace: float
    redactor: Redactor
    secrets: frozenset[str]
    note: Callable[[str], None]
    forward: Callable[[dict[str, Any]], None]

    def build(self, bound: Bound, lock: KeyLock, started: Callable[[NodeStarted], None]) -> Result:
        """Run a worker for a bound node and return its result.

        Args:
            bound: The node.
            lock: The lock of its key; the worker holds it too.
            started: Called with the journal entry of each attempt.

        Raises:
            StageError: The machine lacks the resources, or the worker did not succeed.
            Interrupted: The run was stopped.
        """
        node = bound.node
        self.pool.machine.require(node.name, node.resources)
        demand = Demand.of(node.resources, self.pool.machine, heavy=bool(node.plugin.preload))
        with self.pool.granted(node.name, demand, lambda: self.stop.requested) as grant:
            while True:
                attempt = Attempt.next(self.record.stage(node.name))
                started(_entry(bound, attempt))
                try:
                    return self._once(bound, attempt, lock, grant)
                except LauncherLost:
                    self.launchers.lost()
                    self.note(
                        f"{node.name}: its worker went down with the preloaded interpreter; starting it again"
                    )

    def _once(self, bound: Bound, attempt: Attempt, lock: KeyLock, grant: Grant) -> Result:
        node = bound.node
        request = self._request(bound, attempt, grant)
        write_durably(attempt.request, request.model_dump_json(indent=1).encode())
        job = self._job(node, request, attempt, lock, grant)
        launcher = self.inline or self.launchers.choose(job)

        def forward(event: dict[str, Any]) -> None:
            self.forward({**event, "node": node.name, "attempt": attempt.number})

        with Tail(attempt.events, forward):
            code = supervise(launcher.start(job), self.stop, self.grace, lambda: self._asked(node))
        ports = frozenset(port.name for port in node.outputs())
        return judge(attempt, code, ports, self.stop)

    def _asked(self, node: Node) -> None:
        self.note(f"{node.name}: asked to checkpoint and stop; a second interrupt ends it at once")

    def _request(self, bound: Bound, attempt: Attempt, grant: Grant) -> Request:
        return Request(
            run=self.record.run,
            node=bound.node.name,
            uses=bound.node.uses,
            attempt=attempt.number,
            key=bound.key,
            config=bound.options,
            inputs=bound.digests,
            workspace=str(self.record.workspace),
            work=str(self.store.work(bound.key)),
            directory=str(attempt.directory),
            base=str(self.graph.base),
            plugins=list(self.plugins),
            secrets=declared_secrets(bound.node),
            identities={name: bound.ingredients[name] for name in ("stage", "components")},
            threads=grant.cpus,
            device="cuda" if grant.gpus else "cpu",
        )

    def _job(self, node: Node, request: Request, attempt: Attempt, lock: KeyLock, grant: Grant) -> Job:
        runtime = node.runtime
        environment = worker_environment(
            os.environ,
            threads=grant.cpus,
            gpus=grant.gpus,
            secrets=request.secrets,
            others=self.secrets,
            extra=runtime.env,
        )
        python = None if runtime.python is None else _interpreter(runtime.python, self.graph.base)
        if python is not None:
            environment = with_posttrain(environment, python, self.record.workspace)
        return Job(
            request=attempt.request,
            log=attempt.log,
            environment=environment,
            descriptors={LIVENESS_FD: self.lifeline.read_end, LOCK_FD: lock.fileno()},
            python=python,
            preload=node.plugin.preload,
            forkable=may_fork(node),
            redact=self.redactor.text if request.secrets else None,
        )


def may_fork(node: Node) -> bool:
    """Whether a preloaded interpreter may fork the worker: on CPU, no secrets, no own runtime."""
    other = node.runtime.python or node.runtime.env or node.resources.gpus or declared_secrets(node)
    return bool(node.plugin.preload) and not other


def _entry(bound: Bound, attempt: Attempt) -> NodeStarted:
    return NodeStarted(
        node=bound.node.name,
        uses=bound.node.uses,
        key=bound.key,
        attempt=attempt.number,
        config=bound.options,
        inputs=bound.digests,
    )


def _interpreter(python: str, base: Path) -> str:
    """Return a path as seen from the pipeline's directory; a bare name is looked up on the search path."""
    return str(base / Path(python).expanduser()) if os.sep in python else python
