"""A whole run from its first journal entry to its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from posttrain.contracts.runner import NodeResult, NodeStatus, Runner
from posttrain.errors import (
    ExitCode,
    HandoffError,
    Interrupted,
    PluginError,
    PosttrainError,
    SpecError,
    StageError,
)
from posttrain.execution.resumption import repeats
from posttrain.execution.run import PipelineRun
from posttrain.execution.signals import on_stop_signals
from posttrain.registry.isolation import undisturbed

RunStatus = Literal["completed", "rejected", "inconclusive", "failed", "interrupted"]
GRACE = "POSTTRAIN_GRACE_SECONDS"
_DEFAULT_GRACE = 60.0

_WORST_FIRST: tuple[tuple[NodeStatus, RunStatus], ...] = (
    (NodeStatus.FAILED, "failed"),
    (NodeStatus.INTERRUPTED, "interrupted"),
    (NodeStatus.REJECTED, "rejected"),
    (NodeStatus.INCONCLUSIVE, "inconclusive"),
)
_EXIT_CODES: dict[RunStatus, ExitCode] = {
    "completed": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "interrupted": ExitCode.INTERRUPTED,
    "rejected": ExitCode.REJECTED,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


@dataclass(frozen=True)
class RunReport:
    """How a run ended."""

    run: str
    status: RunStatus
    results: Mapping[str, NodeResult]

    @property
    def exit_code(self) -> ExitCode:
        """What the command reports to the shell."""
        return exit_code(self.status)

    @property
    def to_mend(self) -> bool:
        """Whether options or data made it fail: it would fail again in the same way until they are mended."""
        failed = [result for result in self.results.values() if result.status is NodeStatus.FAILED]
        return repeats(result.error for result in failed)

    def require_completed(self) -> RunReport:
        """Return the report of a completed run; for scripts that go on with what the run made.

        Raises:
            StageError: A node failed. Interrupted: The run was stopped. HandoffError: A gate did not pass.
        """
        if self.status == "completed":
            return self
        kind = {"failed": StageError, "interrupted": Interrupted}.get(self.status, HandoffError)
        bad = [result for result in self.results.values() if not result.status.passes]
        first = next((result for result in bad if result.status is not NodeStatus.SKIPPED), None)
        raise kind(
            f"run {self.run} ended {self.status}",
            where=None if first is None else first.node,
            found=None if first is None else first.summary or first.status.value,
            fix=self._fix(),
        )

    def _fix(self) -> str | None:
        if self.to_mend:
            return "mend what is named there, then run again; what is done is reused"
        return f"posttrain resume {self.run}" if self.status in ("failed", "interrupted") else None


def execute(
    run: PipelineRun, runner: Runner, *, pipeline: str, runner_name: str, resumed: bool = False
) -> RunReport:
    """Let a runner perform every node, with signals, journal and exit code around it.

    What counts is what this process saw happen, not what the runner returns: a node that was never performed
    fails the run.

    Raises:
        StoreError: Another process works on this run.
        StageError: The runner left nodes out.
        PluginError: The runner itself raised something; the journal then says that the run failed.
        Exception: With `debug`, whatever a stage raises.
    """
    with closing(run), run.record.claimed(), on_stop_signals(_stopper(run)), undisturbed():
        run.begin(pipeline, runner_name, resumed=resumed)
        try:
            _let_perform(run, runner, runner_name)
            _require_all(run)
        except BaseException:
            run.finish("interrupted" if run.stop.requested else "failed")
            raise
        status = overall(result.status for result in run.results.values())
        run.finish(status)
    return RunReport(run.run, status, dict(run.results))


def _stopper(run: PipelineRun) -> Callable[[int], None]:
    """Return what a signal does: ask to stop. Nobody can kill a stage in this process, so a second one raises."""

    def act(number: int) -> None:
        run.stop.ask()
        if run.inline and run.stop.urgent:
            raise KeyboardInterrupt

    return act


def _let_perform(run: PipelineRun, runner: Runner, name: str) -> None:
    try:
        runner.run(run)
    except PosttrainError:
        raise
    except Exception as error:
        if run.debug:
            raise
        raise PluginError(
            f"the runner {name!r} failed",
            where=run.run,
            found=f"{type(error).__name__}: {error}",
            fix="`posttrain resume --runner sequential` goes on without it",
        ) from error


def _require_all(run: PipelineRun) -> None:
    missing = [name for name in run.order if name not in run.results]
    if missing:
        raise StageError(
            "the runner ended without performing every node", where=run.run, found=", ".join(missing)
        )


def exit_code(status: RunStatus) -> ExitCode:
    """Return what the command reports to the shell for a run that ended so."""
    return _EXIT_CODES[status]


def overall(statuses: Iterable[NodeStatus]) -> RunStatus:
    """Return how a run ended: the worst of its nodes decides."""
    seen = set(statuses)
    return next((status for node, status in _WORST_FIRST if node in seen), "completed")


def grace_seconds() -> float:
    """Return the seconds a worker may take to checkpoint on a stop (`POSTTRAIN_GRACE_SECONDS`, or 60)."""
    text = os.environ.get(GRACE)
    if text is None:
        return _DEFAULT_GRACE
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SpecError(
            "this is not a number of seconds", where=GRACE, found=text, expected="a number such as 60"
        )
    return seconds
