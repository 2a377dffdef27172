"""The Prefect runner: one flow for the run, one task for each node.

Prefect gives order, concurrency and a page to look at. It holds no results and decides no caching: tasks get
three small values, and what a node did is in the journal. When Prefect fails, the stages run all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.contracts.runner import Execution, NodeResult, NodeStatus
from posttrain.errors import PosttrainError, StoreError
from posttrain.execution.journal import RunStarted, read_journal
from posttrain_pipelines.extras import require
from posttrain_pipelines.flow.server import configured_api, ensure_server
from posttrain_pipelines.flow.server import token as server_token
from posttrain_pipelines.flow.states import flow_state, task_state
from posttrain_pipelines.redaction import redactor_of
from posttrain_pipelines.services import ServiceError, answers


class PrefectRunner:
    """Runs a pipeline as a Prefect flow against the local server, or against `PREFECT_API_URL`."""

    def run(self, execution: Execution) -> Mapping[str, NodeResult]:
        """Perform every node and return all results."""
        require("prefect")
        ledger, pipeline = Ledger(execution), _pipeline(execution)
        try:
            url, token = _server(execution)
        except (ServiceError, OSError) as error:
            execution.note(f"Prefect server could not be started ({_brief(error)}): running without it")
            return _without_prefect(ledger)
        outage = _in_thread(lambda: _run_flow(ledger, pipeline, url, token))
        if ledger.defect is not None:
            raise ledger.defect
        if outage is not None:
            execution.note(f"Prefect failed ({_brief(outage)}): going on without it")
            return _without_prefect(ledger)
        return ledger.results


class Ledger:
    """An execution that performs each node once, whoever asks, and remembers the results."""

    def __init__(self, execution: Execution) -> None:
        self.run = execution.run
        self.workspace = execution.workspace
        self.spec_digest = execution.spec_digest
        self.order: Sequence[str] = execution.order
        self.dependencies: Mapping[str, Sequence[str]] = execution.dependencies
        self.note = execution.note
        self.results: dict[str, NodeResult] = {}
        self.defect: BaseException | None = None
        """What `perform` raised: never a stage's failure, so the run cannot go on."""
        self._execution = execution
        self._locks = {node: threading.Lock() for node in execution.order}

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._execution.stopping

    def perform(self, node: str) -> NodeResult:
        """Perform a node that was not performed yet; who asks while it is performed gets the same result."""
        with self._locks[node]:
            if node not in self.results:
                if self.defect is not None:
                    return NodeResult(node, NodeStatus.SKIPPED, summary="the run broke off")
                try:
                    self.results[node] = self._execution.perform(node)
                except BaseException as defect:
                    self.defect = defect
                    raise
            return self.results[node]


def _server(execution: Execution) -> tuple[str, str | None]:
    """Return the address of the API, and the password if it is the workspace's own server."""
    configured = configured_api()
    if configured is None:
        service = ensure_server(execution.workspace, stopping=lambda: execution.stopping, note=execution.note)
        return service.url, server_token(execution.workspace)
    if not answers(configured.rstrip("/") + "/health"):
        raise ServiceError("the configured Prefect server does not answer", where="PREFECT_API_URL")
    return configured, None


def _run_flow(ledger: Ledger, name: str, url: str, token: str | None) -> None:
    """Run the flow to its end; raises what Prefect raises."""
    from posttrain_pipelines.flow.engine import end_earlier_runs, load_prefect, session

    load_prefect(ledger.workspace)
    import prefect
    from prefect.cache_policies import NO_CACHE
    from prefect.client.schemas.objects import State, StateType
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

    threads: TaskRunner[Any] = ThreadPoolTaskRunner()
    redactor = redactor_of(ledger.workspace / "runs" / ledger.run)

    def state(kind: str, name: str, message: str) -> State[None]:
        return State(type=StateType(kind), name=name, message=redactor.text(message))

    @prefect.task(cache_policy=NO_CACHE, persist_result=False, retries=0, task_run_name="{node}")
    def perform(run: str, node: str, spec: str) -> State[None]:
        return state(*task_state(ledger.perform(node)))

    @prefect.flow(
        name=name,
        flow_run_name=ledger.run,
        task_runner=threads,
        persist_result=False,
        retries=0,
        validate_parameters=False,
    )
    def pipeline(run: str, spec: str) -> State[None]:
        futures: dict[str, PrefectFuture[Any]] = {}
        for node in ledger.order:
            needed = [prefect.allow_failure(futures[dependency]) for dependency in ledger.dependencies[node]]
            task = perform.with_options(name=node)
            futures[node] = task.submit(run=run, node=node, spec=spec, wait_for=needed, return_state=False)
        for future in futures.values():
            future.wait()
        if ledger.defect is not None:
            raise RuntimeError("the run broke off")
        return state(*flow_state(ledger.results.values()))

    with session(ledger.workspace, url, token):
        end_earlier_runs(ledger.run)
        pipeline(run=ledger.run, spec=ledger.spec_digest, return_state=True)


def _in_thread(work: Callable[[], None]) -> Exception | None:
    """Do `work` in a thread of its own and return what it raised.

    Prefect replaces signal handlers in the main thread only; here Ctrl-C and SIGTERM stay with the run.
    """
    raised: list[Exception] = []

    def target() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - every failure of Prefect is an outage, reported by the caller
            raised.append(error)

    thread = threading.Thread(target=target, name="prefect-flow", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return raised[0] if raised else None


def _without_prefect(ledger: Ledger) -> Mapping[str, NodeResult]:
    from posttrain.execution.sequential import SequentialRunner

    return SequentialRunner().run(ledger)


def _pipeline(execution: Execution) -> str:
    directory = execution.workspace / "runs" / execution.run
    for entry in read_journal(directory):
        if isinstance(entry, RunStarted):
            return entry.pipeline
    raise StoreError("this run's journal does not say which pipeline it belongs to", where=str(directory))


def _brief(error: BaseException) -> str:
    """Return one line about an error."""
    text = error.message if isinstance(error, PosttrainError) else str(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
