"""How the metrics of a stage went, read back from what its attempts told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts.store import Store
from posttrain.errors import SpecError, StoreError
from posttrain.execution.journal import events_of
from posttrain.execution.records import NodeState, RunRecord, RunState, find_run, list_runs, run_state
from posttrain.wording import did_you_mean, listed

METRICS = "metrics"
"""The type of the events that hold values by metric."""

Curves = dict[str, dict[int, float]]
"""Values by metric and step."""


@dataclass(frozen=True)
class Course:
    """How a stage went.

    Args:
        run: Id of the run that built it.
        node: Its name there.
        curves: Its finite metrics.
    """

    run: str
    node: str
    curves: Curves


def curves_of(stage: Path) -> Curves:
    """Return the finite metrics of a stage in one run.

    Where an attempt began anew, what an earlier one told from that step on does not count.

    Args:
        stage: Its directory, with one for each attempt.

    Raises:
        StoreError: What an attempt told is damaged.
    """
    found: Curves = {}
    for number in sorted(int(path.name) for path in stage.glob("*") if path.name.isdecimal()):
        told = _told(stage / str(number))
        first = min((step for points in told.values() for step in points), default=math.inf)
        for name in {**found, **told}:
            earlier = {step: value for step, value in found.get(name, {}).items() if step < first}
            found[name] = earlier | told.get(name, {})
    return {name: points for name, points in found.items() if points}


def _told(attempt: Path) -> Curves:
    found: Curves = {}
    for event in events_of(attempt, METRICS):
        for name, value in event["values"].items():
            if value is not None and math.isfinite(value):
                found.setdefault(name, {})[event["step"]] = value
    return found


def course_of(what: str, store: Store) -> Course:
    """Return how a stage went that a name means.

    Args:
        what: `NODE` in the newest run that came to it, `RUN:NODE`, or `PIPELINE:NODE` in the newest run of it. Of a
            stage that was cached in that run, how it went when it was built.
        store: The store.

    Raises:
        SpecError: There is no such run, or no such stage.
        StoreError: The stage told no metrics, or what it told is damaged.
    """
    asked, _, node = what.rpartition(":")
    known: list[str] = []
    for state in _states(asked, store.workspace):
        if node in state.nodes:
            return _course(state, state.nodes[node], store)
        known += [name for name in state.nodes if name not in known]
    cells = [name for name in known if name.partition("[")[0] == node]
    raise SpecError(
        "this is a sweep" if cells else "no run came to a stage of that name",
        where=what,
        expected=f"one of {listed(cells or known)}" if known else "a stage of a run",
        fix=None if cells else did_you_mean(node, known),
    )


def _states(asked: str, workspace: Path) -> Iterator[RunState]:
    """Yield the runs that a name may mean, the newest first."""
    states = (run_state(record) for record in reversed(list_runs(workspace)))
    if not asked:
        yield from states
        return
    yield from [state for state in states if state.pipeline == asked] or [
        run_state(find_run(workspace, asked))
    ]


def _course(state: RunState, node: NodeState, store: Store) -> Course:
    record, name = state.record, node.node
    key = None if node.ended is None else node.ended.key
    origin = None if node.attempts or key is None else store.lookup(key)
    if origin is not None:
        record, name = RunRecord(record.workspace, origin.run), origin.node
    curves = curves_of(record.stage(name))
    if not curves:
        raise StoreError(
            "the stage told no metrics",
            where=f"{name} in run {record.run}",
            found=node.status.value if record.directory.is_dir() else "a run whose record is gone",
            fix=f"name a run in which it did: RUN:{name}; `posttrain status` lists the runs",
        )
    return Course(record.run, name, curves)
