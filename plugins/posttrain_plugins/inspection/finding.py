"""Finding what a command names: a file or directory, a stage's output, an alias, or a digest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError

if TYPE_CHECKING:
    from posttrain.execution.records import RunRecord

NAMES = (
    "the start of a digest, NODE or NODE.PORT as last run, RUN:NODE.PORT, PIPELINE:NODE.PORT, or NAME@ALIAS"
)
"""How an artifact can be named."""

Outputs = Mapping[str, Mapping[str, str]]
"""Digests by node and port."""


@dataclass(frozen=True)
class Found:
    """An artifact that a command names.

    Args:
        artifact: The artifact.
        origin: The pipeline and the run whose output was meant; None where it was named otherwise.
    """

    artifact: Artifact
    origin: str | None = None


def find(what: str, workspace: Path, kinds: Collection[Kind]) -> Artifact:
    """Return the artifact that a command names; as `found`."""
    return found(what, workspace, kinds).artifact


def found(what: str, workspace: Path, kinds: Collection[Kind]) -> Found:
    """Return the artifact that a command names, and the run that was meant.

    Args:
        what: `NODE` or `NODE.PORT` (its output in the newest run that has it, built there or cached),
            `RUN:NODE.PORT`, `PIPELINE:NODE.PORT` (in the newest run of it), `NAME@ALIAS`, or the start of a digest.
        workspace: The `.posttrain` directory.
        kinds: What it may be.

    Raises:
        StoreError: There is none, it is of another kind, or several are meant.
    """
    store = Store(workspace.absolute())
    if not store.objects.is_dir():
        raise _nothing(what, kinds, f"no artifacts in {store.workspace}")
    digest, origin = _digest(what, store, kinds)
    artifact = store.get(digest)
    if artifact.kind not in kinds:
        raise StoreError(
            "this artifact is of another kind", where=what, found=artifact.ref, expected=_listed(kinds)
        )
    return Found(artifact, origin)


def _digest(what: str, store: Store, kinds: Collection[Kind]) -> tuple[str, str | None]:
    if "@" in what:
        return _aliased(what, store), None
    run, _, node = what.rpartition(":")
    origin, named = _newest(node, store) if run in ("", *Kind) else _of_run(run, node, store)
    fitting = {name: digest for name, digest in named.items() if store.get(digest).kind in kinds} or named
    if len(set(fitting.values())) > 1:
        raise StoreError(
            "several outputs are meant",
            where=what,
            found=", ".join(sorted(fitting)),
            expected="one NODE.PORT",
        )
    if fitting:
        return next(iter(fitting.values())), origin
    try:
        return store.find(what).digest, None
    except StoreError as error:
        raise _nothing(what, kinds, error.message) from error


def _nothing(what: str, kinds: Collection[Kind], found: str) -> StoreError:
    listed = _listed(kinds)
    return StoreError(
        f"there is neither a file nor {'an' if listed.startswith('a') else 'a'} {listed} of that name",
        where=what,
        found=found,
        expected=f"a path, {NAMES}",
        fix="check the name, or give the store's directory with `--workspace`",
    )


def _listed(kinds: Collection[Kind]) -> str:
    return " or ".join(sorted(kind.value for kind in kinds))


def _aliased(what: str, store: Store) -> str:
    name, _, alias = what.rpartition("@")
    aliases = Aliases(store.workspace)
    version = aliases.current(name, alias)
    if version is None:
        known = ", ".join(f"{each}@{key}" for each in aliases.names() for key in aliases.aliases(each))
        raise StoreError("there is no such alias", where=what, expected=known or "none is set")
    return version.digest


def _newest(name: str, store: Store) -> tuple[str | None, dict[str, str]]:
    """Return what a name means in the newest run that has it, and which run that is.

    Where no run is left that has it, the newest record of a build counts.
    """
    for _, origin, outputs in _runs(store):
        named = _outputs(name, outputs)
        if named and all(map(store.has, named.values())):
            return origin, named
    from posttrain.planning.past import Past

    records = Past.of(store).newest()
    named = _outputs(name, {node: record.outputs for node, record in records.items()})
    nodes = {output.rpartition(".")[0] for output in named}
    origins = {_told(records[node].pipeline, records[node].run) for node in nodes}
    return (origins.pop() if len(origins) == 1 else None), named


def _runs(store: Store) -> Iterator[tuple[str, str, Outputs]]:
    """Yield pipeline and outputs of all runs, the newest first, with how each is called."""
    from posttrain.execution.records import list_runs

    for record in reversed(list_runs(store.workspace)):
        yield _run(record)


def _of_run(run: str, name: str, store: Store) -> tuple[str, dict[str, str]]:
    """Return what a name means in one run, or in the newest run of a pipeline that has it."""
    from posttrain.execution.records import find_run

    for pipeline, origin, outputs in _runs(store):
        if pipeline == run and (named := _outputs(name, outputs)):
            return origin, named
    _, origin, outputs = _run(find_run(store.workspace, run))
    return origin, _outputs(name, outputs)


def _run(record: RunRecord) -> tuple[str, str, Outputs]:
    from posttrain.execution.records import run_state

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
