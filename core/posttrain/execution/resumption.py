"""Which run to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def resumable(workspace: Path, run: str | None = None) -> RunRecord:
    """Return the run to go on with: the named one, or the newest that was interrupted, killed or failed.

    Raises:
        StoreError: There is no such run, it is running or damaged, or there is nothing left to do.
    """
    record = find_run(workspace, run)
    if run is not None:
        require_resumable(record)
        return record
    for each in reversed(list_runs(workspace)):
        if run_state(each).status in UNFINISHED:
            return each
    raise StoreError(
        "no run was interrupted, was killed, or failed",
        where=str(record.directory.parent),
        fix="`posttrain status` lists the runs; name one to go on with it",
    )


def suggested(states: Sequence[RunState]) -> RunRecord | None:
    """Return the newest run worth going on with: it broke off, and no run of its pipeline came later.

    Args:
        states: Runs, oldest first.
    """
    last = {state.pipeline: state.record for state in states if state.damage is None}
    broken = [state.record for state in states if state.status in UNFINISHED]
    return next((record for record in reversed(broken) if record in last.values()), None)
