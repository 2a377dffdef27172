"""One run of a graph: what a runner is given to perform nodes with."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.artifacts.locks import held
from posttrain.artifacts.store import KeyRecord, Store
from posttrain.contracts.runner import NodeResult, NodeStatus
from posttrain.contracts.stage import Input, Level
from posttrain.errors import Interrupted, PosttrainError, StageError
from posttrain.execution.binding import Bound, bind, declared_secrets
from posttrain.execution.blame import explain
from posttrain.execution.building import Builder, may_fork
from posttrain.execution.commit import commit
from posttrain.execution.environment import worker_environment
from posttrain.execution.fork import Launchers
from posttrain.execution.journal import NodeEnded, NodeStarted, RunEnded, RunNote, RunStarted
from posttrain.execution.launch import InlineLauncher
from posttrain.execution.liveness import Lifeline
from posttrain.execution.protocol import Result
from posttrain.execution.records import RunRecord
from posttrain.execution.resources import Pool
from posttrain.execution.signals import Stop
from posttrain.planning.capacity import Machine
from posttrain.planning.graph import Graph, Node, Reference
from posttrain.planning.handoffs import real_input
from posttrain.planning.secrets import Redactor
from posttrain.registry.catalogue import Catalogue

LauncherName = Literal["auto", "process", "inline"]
Observer = Callable[[dict[str, Any]], None]

_ENDS = {
    "completed": NodeStatus.COMPLETED,
    "rejected": NodeStatus.REJECTED,
    "inconclusive": NodeStatus.INCONCLUSIVE,
}
_WAIT = 0.1


@dataclass
class Trace:
    """What is known of a node while it is performed, for its entry in the journal."""

    node: Node
    begun: float = field(default_factory=time.monotonic)
    bound: Bound | None = None
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """How long the node has taken so far."""
        return time.monotonic() - self.begun


class PipelineRun:
    """Implements `posttrain.contracts.runner.Execution`.

    Args:
        graph: The nodes.
        catalogue: The plugins.
        record: Where the run keeps its record.
        spec_digest: Digest of the pipeline.
        plugins: Local plugin files, for the workers.
        launcher: `auto` forks CPU stages from a preloaded interpreter, `process` never does, `inline` runs
            stages in this process.
        observer: Gets every journal entry and every event of a stage; called from several threads.
        machine: What there is to hand out; by default what this machine has.
        grace: Seconds a worker may take to checkpoint when the run stops.
        debug: With `inline`, let a stage's exception through.
        expected: The nodes that are not cached, when a plan says so: the preloaded interpreter is then started
            at the beginning, for these alone. Else it is started for the first stage that it may fork.
    """

    def __init__(
        self,
        graph: Graph,
        catalogue: Catalogue,
        record: RunRecord,
        *,
        spec_digest: str,
        plugins: Sequence[Path] = (),
        launcher: LauncherName = "auto",
        observer: Observer | None = None,
        machine: Machine | None = None,
        grace: float = 60.0,
        debug: bool = False,
        expected: Collection[str] | None = None,
    ) -> None:
        self.run, self.workspace = record.run, record.workspace
        self.spec_digest = spec_digest
        self.order: Sequence[str] = graph.order
        self.dependencies: Mapping[str, Sequence[str]] = graph.dependencies
        self.record = record
        self.stop = Stop()
        self.results: dict[str, NodeResult] = {}
        self._graph, self._catalogue = graph, catalogue
        self._store, self._journal = Store(record.workspace), record.journal
        self._observer, self.debug = observer, debug
        self.inline = launcher == "inline"
        secrets = frozenset(name for node in graph.nodes.values() for name in declared_secrets(node))
        self._redactor = Redactor(os.environ[name] for name in sorted(secrets) if name in os.environ)
        self._outputs: dict[Reference, Input] = {}
        self._lock = threading.Lock()
        self._lifeline = Lifeline()
        machine = machine or Machine.here()
        self._early = expected is not None
        self._launchers = Launchers(
            preload=_preload(graph, expected) if launcher == "auto" else (),
            environment=worker_environment(os.environ, threads=machine.cpus, others=secrets),
            log=record.directory / "zygote.log",
            note=self.note,
        )
        self._builder = Builder(
            graph=graph,
            store=self._store,
            record=record,
            plugins=[str(Path(file).absolute()) for file in plugins],
            pool=Pool(machine),
            launchers=self._launchers,
            inline=InlineLauncher(lambda: self.stop.requested, debug, secrets) if self.inline else None,
            lifeline=self._lifeline,
            stop=self.stop,
            grace=grace,
            redactor=self._redactor,
            secrets=secrets,
            note=self.note,
            forward=self._forward,
        )

    def begin(self, pipeline: str, runner: str, *, resumed: bool = False) -> None:
        """Write the run's beginning into the journal."""
        self._enter(
            RunStarted(
                run=self.run,
                pipeline=pipeline,
                spec_digest=self.spec_digest,
                runner=runner,
                pid=os.getpid(),
                resumed=resumed,
            )
        )
        if self._early:
            self._launchers.warm()

    def finish(
        self, status: Literal["completed", "rejected", "inconclusive", "failed", "interrupted"]
    ) -> None:
        """Write the run's end into the journal."""
        self._enter(RunEnded(status=status))

    def close(self) -> None:
        """End the preloaded interpreter and whatever still runs."""
        self._launchers.close()
        self._lifeline.close()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.stop.requested

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        """Put a note into the journal and tell the observer."""
        self._enter(RunNote(message=self._redactor.text(message), level=level))

    def perform(self, node: str) -> NodeResult:
        """Bind, reuse or run one node, journal it, and return its end."""
        self._require_order(node)
        trace = Trace(self._graph.nodes[node])
        try:
            return self._perform(trace)
        except Interrupted as error:
            return self._end(trace, NodeStatus.INTERRUPTED, summary=error.message, error=error.as_dict())
        except KeyboardInterrupt:
            self._end(trace, NodeStatus.INTERRUPTED, summary="interrupted at once")
            raise
        except Exception as error:
            parts = explain(error, (trace.node.plugin.target,), self.workspace)
            result = self._end(trace, NodeStatus.FAILED, summary=str(parts["message"]), error=parts)
            if self.debug and trace.attempt is not None:
                raise
            return result

    def _require_order(self, node: str) -> None:
        missing = [name for name in self.dependencies[node] if name not in self.results]
        if missing:
            raise StageError(
                f"the runner performed {node} before what it depends on", where=node, found=", ".join(missing)
            )

    def _perform(self, trace: Trace) -> NodeResult:
        node = trace.node
        blocking = [self.results[name] for name in self.dependencies[node.name]]
        blocked = [f"{result.node} ({result.status})" for result in blocking if not result.status.passes]
        if self.stop.requested:
            raise Interrupted(
                "the run was stopped before this node began", where=node.name, fix="posttrain resume"
            )
        if blocked:
            return self._end(trace, NodeStatus.SKIPPED, summary=f"needs {', '.join(blocked)}")
        bound = trace.bound = bind(self._graph, node, self._outputs, self._catalogue, self._store)
        # Held until the end is in the journal: a collection then spares the outputs, and another run waits.
        with self._store.lock(bound.key, on_wait=lambda: self._wait(bound)) as lock:
            record = self._cached(bound)
            if record is not None:
                status = _ENDS[record.status]
                return self._finish(trace, record, NodeStatus.CACHED if status.passes else status)
            if node.name in self._graph.required:
                raise StageError(
                    "this node is outside of the selection and its outputs are not in the store",
                    where=node.name,
                    fix="run the whole pipeline once, or select from an earlier stage",
                )
            for warning in bound.warnings:
                self.note(f"{node.name}: {warning}", Level.WARNING)
            result = self._builder.build(bound, lock, lambda started: self._started(trace, started))
            self._require_same_sources(bound, result)
            record = commit(self._store, bound, result, self.run, trace.seconds)
            self._store.clear_work(bound.key)
            return self._finish(trace, record, _ENDS[record.status])

    def _require_same_sources(self, bound: Bound, result: Result) -> None:
        """Throw away what was built while a source changed, checkpoints included: they belong to no key."""
        try:
            bound.require_same_sources(self._graph.base, self._store)
        except PosttrainError:
            for output in result.outputs:
                self._store.discard(Path(output.sealed))
            self._store.clear_work(bound.key)
            raise

    def _wait(self, bound: Bound) -> None:
        """Wait for another process that builds the same outputs, without becoming deaf to a stop."""
        self.note(f"{bound.node.name}: waits for another process that is building the same outputs")
        while held(self._store.lock_file(bound.key)):
            if self.stop.requested:
                raise Interrupted("stopped while waiting for another process", where=bound.node.name)
            time.sleep(_WAIT)

    def _cached(self, bound: Bound) -> KeyRecord | None:
        """Return what the key gave, if that still counts; else forget it, and let a note say why."""
        node, record = bound.node, self._store.lookup(bound.key)
        if record is None:
            return None
        if node.plugin.pinned(node.config) is not None and record.run != self.run:
            return None
        reason = self._store.usable(record)
        if reason is not None:
            self.note(f"{node.name}: {reason}; building it again")
            self._store.forget(bound.key)
            return None
        if node.plugin.external:
            reason = node.plugin.holds(node.config, bound.inputs, self.workspace)
            if reason is not None:
                self.note(f"{node.name}: {reason}; running it again")
                return None
        return record

    def _started(self, trace: Trace, entry: NodeStarted) -> None:
        trace.attempt = entry.attempt
        self._enter(entry)

    def _finish(self, trace: Trace, record: KeyRecord, status: NodeStatus) -> NodeResult:
        """Make the outputs known to what depends on them and end the node."""
        for port, digest in record.outputs.items():
            reference = Reference(trace.node.name, port)
            found = real_input(reference, self._store.get(digest))
            with self._lock:
                self._outputs[reference] = found
        return self._end(
            trace, status, outputs=record.outputs, figures=record.figures, summary=record.summary
        )

    def _end(
        self,
        trace: Trace,
        status: NodeStatus,
        *,
        outputs: Mapping[str, str] | None = None,
        figures: Mapping[str, float] | None = None,
        summary: str = "",
        error: Mapping[str, Any] | None = None,
    ) -> NodeResult:
        result = NodeResult(
            node=trace.node.name,
            status=status,
            outputs=dict(outputs or {}),
            figures=dict(figures or {}),
            seconds=trace.seconds,
            summary=self._redactor.text(summary),
            error=None if error is None else self._redactor.value(dict(error)),
        )
        bound = trace.bound
        self._enter(
            NodeEnded(
                node=result.node,
                uses=trace.node.uses,
                key=None if bound is None else bound.key,
                attempt=trace.attempt,
                status=status,
                outputs=dict(result.outputs),
                inputs={} if bound is None else bound.digests,
                config={} if bound is None else bound.options,
                figures=dict(result.figures),
                seconds=result.seconds,
                summary=result.summary,
                error=None if result.error is None else dict(result.error),
            )
        )
        with self._lock:
            self.results[result.node] = result
        return result

    def _enter(self, entry: RunStarted | NodeStarted | NodeEnded | RunNote | RunEnded) -> None:
        self._journal.append(entry)
        self._forward(entry.model_dump(mode="json"))

    def _forward(self, event: dict[str, Any]) -> None:
        """Tell the observer. One that fails is told nothing more, and never fails a stage."""
        observer = self._observer
        if observer is None:
            return
        try:
            observer(event)
        except Exception as error:  # noqa: BLE001 - an observer may raise anything; the journal says so
            with self._lock:
                first, self._observer = self._observer is not None, None
            if first:
                message = f"the observer failed and is told nothing more ({type(error).__name__}: {error})"
                self._journal.append(RunNote(message=self._redactor.text(message)))


def _preload(graph: Graph, expected: Collection[str] | None) -> tuple[str, ...]:
    """Return the modules that the nodes which may be forked and are to run want, each once."""
    wanted = graph.nodes.keys() if expected is None else graph.nodes.keys() & expected
    nodes = [node for name, node in graph.nodes.items() if name in wanted and may_fork(node)]
    return tuple(dict.fromkeys(module for node in nodes for module in node.plugin.preload))
