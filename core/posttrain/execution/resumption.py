"""Which run to go on with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import StoreError
from posttrain.execution.records import (
    RunRecord,
    RunState,
    find_run,
    list_runs,
    require_resumable,
    run_state,
)

UNFINISHED = frozenset({"killed", "interrupted", "failed"})
"""The statuses of a run that broke off. A damaged one cannot be gone on with."""
_TO_MEND = frozenset({"SpecError", "SpecProblems", "DataError", "HandoffError", "TrainingDiverged"})
"""Errors that come from what the pipeline says or from its data: the same steps would lead to them again."""


def resumable(workspace: Path, run: str | None = None) -> RunRecord:
    """Return the run to go on with: the named one, or the newest that broke off and that no later one has replaced.

    Raises:
        SpecError: There is no such run.
        StoreError: It is running or damaged, or there is nothing left to do.
    """
    record = find_run(workspace, run)
    if run is not None:
        require_resumable(record)
        return record
    newest = _newest(map(run_state, reversed(list_runs(workspace))), lambda state: True)
    if newest is not None:
        return newest
    raise StoreError(
        "no run was interrupted, was killed, or failed, but for those that a later run of their pipeline replaced",
        where=str(record.directory.parent),
        fix="`posttrain status` lists the runs; name one to go on with it",
    )


def suggested(states: Sequence[RunState]) -> RunRecord | None:
    """Return the newest run worth going on with: it broke off, and no run of its pipeline came later.

    One that options or data made fail would fail again.

    Args:
        states: Runs, oldest first.
    """
    return _newest(reversed(states), lambda state: not _repeats(state))


def _newest(states: Iterable[RunState], wanted: Callable[[RunState], bool]) -> RunRecord | None:
    """Return the first wanted run that broke off, of those that are the first of their pipeline; newest first."""
    seen: set[str] = set()
    for state in states:
        if state.damage is not None:
            continue
        if state.pipeline not in seen and state.status in UNFINISHED and wanted(state):
            return state.record
        seen.add(state.pipeline)
    return None


def repeats(errors: Iterable[Mapping[str, Any] | None]) -> bool:
    """Whether errors of failed nodes, at least one, all lie in options or data: going on would meet them again."""
    kinds = [(error or {}).get("type") for error in errors]
    return bool(kinds) and all(kind in _TO_MEND for kind in kinds)


def _repeats(state: RunState) -> bool:
    ended = [node.ended for node in state.nodes.values() if node.ended is not None]
    return state.status == "failed" and repeats(each.error for each in ended if each.status == "failed")
