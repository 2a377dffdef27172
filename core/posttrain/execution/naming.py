"""What a name means to people: outputs of a stage as last run or in one run, or a registered alias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.store import Store
from posttrain.errors import SpecError
from posttrain.execution.records import RunRecord, find_run, list_runs, run_state
from posttrain.planning.past import Past
from posttrain.wording import listed

NAMES = (
    "the start of a digest, NODE or NODE.PORT as last run, RUN:NODE.PORT, PIPELINE:NODE.PORT, or NAME@ALIAS"
)
"""How an artifact can be named."""

Outputs = Mapping[str, Mapping[str, str]]
"""Digests by node and port."""


@dataclass(frozen=True)
class Named:
    """What a name means.

    Args:
        outputs: Digests by NODE.PORT, of an alias by the empty text; none where nothing is called so.
        origin: The pipeline and the run whose outputs are meant; None where the name leaves no choice.
    """

    outputs: Mapping[str, str] = field(default_factory=dict)
    origin: str | None = None


def named(what: str, store: Store) -> Named:
    """Return the outputs that a name means. The start of a digest is no name: `Store.find` knows it.

    Args:
        what: `NODE` or `NODE.PORT` (its outputs in the newest run that has it, built there or cached),
            `RUN:NODE.PORT`, `PIPELINE:NODE.PORT` (in the newest run of it), or `NAME@ALIAS`.
        store: The store.

    Raises:
        SpecError: There is no such run or alias.
    """
    run, _, node = what.rpartition(":")
    meant = _newest(node, store) if run in ("", *Kind) else _of_run(run, node, store)
    return _aliased(what, store) if "@" in what and not meant.outputs else meant


def _aliased(what: str, store: Store) -> Named:
    name, _, alias = what.rpartition("@")
    aliases = Aliases(store.workspace)
    known = [f"{each}@{key}" for each in aliases.names() for key in aliases.aliases(each)]
    version = aliases.current(name, alias) if what in known else None
    if version is None:
        raise SpecError("there is no such alias", where=what, expected=f"one of {listed(known)}")
    return Named({"": version.digest})


def _newest(name: str, store: Store) -> Named:
    """Return what a name means in the newest run that has it, and which run that is.

    Where no run is left that has it, the newest record of a build counts.
    """
    for _, origin, outputs in _runs(store):
        found = _outputs(name, outputs)
        if found and all(map(store.has, found.values())):
            return Named(found, origin)
    records = Past.of(store).newest()
    found = _outputs(name, {node: record.outputs for node, record in records.items()})
    nodes = {output.rpartition(".")[0] for output in found}
    origins = {_told(records[node].pipeline, records[node].run) for node in nodes}
    return Named(found, origins.pop() if len(origins) == 1 else None)


def _runs(store: Store) -> Iterator[tuple[str, str, Outputs]]:
    """Yield pipeline and outputs of all runs, the newest first, with how each is called."""
    for record in reversed(list_runs(store.workspace)):
        yield _run(record)


def _of_run(run: str, name: str, store: Store) -> Named:
    """Return what a name means in one run, or in the newest run of a pipeline that has it."""
    for pipeline, origin, outputs in _runs(store):
        if pipeline == run and (found := _outputs(name, outputs)):
            return Named(found, origin)
    _, origin, outputs = _run(find_run(store.workspace, run))
    return Named(_outputs(name, outputs), origin)


def _run(record: RunRecord) -> tuple[str, str, Outputs]:
    state = run_state(record)
    ended = {node.node: node.ended.outputs for node in state.nodes.values() if node.ended is not None}
    return state.pipeline, _told(state.pipeline, record.run), ended


def _told(pipeline: str | None, run: str) -> str:
    return f"pipeline {pipeline}, run {run}" if pipeline else f"run {run}"


def _outputs(name: str, built: Outputs) -> dict[str, str]:
    """Return the outputs that a node's name, or a node's and a port's, mean."""
    return {
        f"{node}.{port}": digest
        for node, outputs in built.items()
        for port, digest in outputs.items()
        if name in (node, f"{node}.{port}", node.partition("[")[0], f"{node.partition('[')[0]}.{port}")
    }
