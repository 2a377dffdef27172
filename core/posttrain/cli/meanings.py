"""What names on the command line mean to the verbs that look back: artifacts of the store, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.output import warn
from posttrain.errors import PosttrainError, SpecError, StoreError

if TYPE_CHECKING:
    from posttrain.artifacts.store import KeyRecord, Store
    from posttrain.execution.journal import NodeEnded
    from posttrain.execution.records import RunRecord


def artifacts_named(store: Store, what: str, also: str = "") -> dict[str, str]:
    """Return the digests that a name or a digest's start means: by port, or by NODE.PORT where nodes are several.

    Args:
        store: The store.
        what: The name.
        also: What else the caller takes, for the message.

    Raises:
        SpecError: The name means nothing here, or a run as a whole.
        StoreError: What it means has no outputs, or is damaged.
    """
    from posttrain.execution.naming import named

    if meant := named(what, store).outputs:
        several = len({output.rpartition(".")[0] for output in meant}) > 1
        return {name if several else name.rpartition(".")[2]: digest for name, digest in meant.items()}
    try:
        return {"": store.find(what).digest}
    except SpecError as error:
        raise _nothing_named(store, what, also, error) from error


def records_of_run(store: Store, text: str) -> dict[str, KeyRecord] | None:
    """Return the key records of a run's nodes, or None when the text names no run."""
    from posttrain.execution.journal import node_ends

    matching = _runs(store.workspace, text)
    if len(matching) != 1:
        return None
    found = {}
    for node, end in node_ends(matching[0].directory).items():
        record = None if end.key is None else store.lookup(end.key)
        if record is not None:
            found[node] = record
    return found


def _nothing_named(store: Store, what: str, also: str, error: SpecError) -> PosttrainError:
    from posttrain.execution.naming import NAMES
    from posttrain.planning.past import Past
    from posttrain.wording import did_you_mean, listed

    if ended := _last_end(store.workspace, what):
        return StoreError(
            f"{what} has no outputs yet",
            where=what,
            found=f"{ended.status}: {ended.summary}" if ended.summary else ended.status.value,
            fix="`posttrain status RUN` shows how its run stands",
        )
    if runs := _runs(store.workspace, what):
        return _run_named(what, runs)
    if set(what.rpartition(":")[2]) <= set("0123456789abcdef") and len(what) >= 4:
        return error
    past = Past.of(store)
    warn(past.damaged)
    nodes = sorted(past.newest())
    return SpecError(
        "nothing here has that name",
        where=what,
        expected=f"{also}{NAMES}" + (f"; NODE is one of {listed(nodes)}" if nodes else ""),
        fix=did_you_mean(what, nodes),
    )


def _run_named(what: str, runs: list[RunRecord]) -> SpecError:
    from posttrain.wording import listed

    if len(runs) > 1:
        names = listed(run.run for run in runs[-5:])
        return SpecError("several runs have such an id", where=what, expected=f"one of {names}")
    run = runs[0].run
    return SpecError(
        "this is a run, not a stage or an artifact",
        where=what,
        found=f"run {run}",
        expected=f"{run}:NODE for the outputs of one of its stages",
        fix=f"`posttrain status {run}` shows its stages",
    )


def _last_end(workspace: Path, node: str) -> NodeEnded | None:
    """Return how a node ended in the newest run that came to it."""
    from posttrain.execution.records import list_runs, run_state

    for record in reversed(list_runs(workspace)):
        state = run_state(record).nodes.get(node)
        if state is not None and state.ended is not None:
            return state.ended
    return None


def _runs(workspace: Path, text: str) -> list[RunRecord]:
    """Return the runs that a text means which is no stage's name by chance: it is not short, and has a digit."""
    from posttrain.execution.records import matching_runs

    distinct = len(text) >= 4 and any(map(str.isdecimal, text))
    return matching_runs(workspace, text) if distinct else []
