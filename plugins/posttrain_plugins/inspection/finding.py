"""Finding what a command names: a file or directory, a stage's output, an alias, or a digest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError

NAMES = "the start of a digest, NODE or NODE.PORT as last built, RUN:NODE.PORT, or NAME@ALIAS"
"""How an artifact can be named."""


def find(what: str, workspace: Path, kinds: Collection[Kind]) -> Artifact:
    """Return the artifact that a command names.

    Args:
        what: `NODE` or `NODE.PORT` (its newest output), `RUN:NODE.PORT`, `NAME@ALIAS`, or the start of a digest.
        workspace: The `.posttrain` directory.
        kinds: What it may be.

    Raises:
        StoreError: There is none, it is of another kind, or several are meant.
    """
    store = Store(workspace.absolute())
    if not store.objects.is_dir():
        raise _nothing(what, kinds, f"no artifacts in {store.workspace}")
    artifact = store.get(_digest(what, store, kinds))
    if artifact.kind not in kinds:
        raise StoreError(
            "this artifact is of another kind", where=what, found=artifact.ref, expected=_listed(kinds)
        )
    return artifact


def _digest(what: str, store: Store, kinds: Collection[Kind]) -> str:
    if "@" in what:
        return _aliased(what, store)
    run, _, node = what.rpartition(":")
    named = _outputs(node, _built(store) if run in ("", *Kind) else _of_run(run, store))
    fitting = {name: digest for name, digest in named.items() if store.get(digest).kind in kinds} or named
    if len(set(fitting.values())) > 1:
        raise StoreError(
            "several outputs are meant",
            where=what,
            found=", ".join(sorted(fitting)),
            expected="one NODE.PORT",
        )
    if fitting:
        return next(iter(fitting.values()))
    try:
        return store.find(what).digest
    except StoreError as error:
        raise _nothing(what, kinds, error.message) from error


def _nothing(what: str, kinds: Collection[Kind], found: str) -> StoreError:
    return StoreError(
        f"there is neither a file nor a {_listed(kinds)} of that name",
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


def _built(store: Store) -> Mapping[str, Mapping[str, str]]:
    """Return the newest outputs of every node, by port."""
    from posttrain.planning.past import Past

    return {node: record.outputs for node, record in Past.of(store).newest().items()}


def _of_run(run: str, store: Store) -> Mapping[str, Mapping[str, str]]:
    """Return the outputs of the nodes of one run."""
    from posttrain.execution.records import find_run, run_state

    nodes = run_state(find_run(store.workspace, run)).nodes.values()
    return {node.node: node.ended.outputs for node in nodes if node.ended is not None}


def _outputs(name: str, built: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the outputs that a node's name, or a node's and a port's, mean."""
    return {
        f"{node}.{port}": digest
        for node, outputs in built.items()
        for port, digest in outputs.items()
        if name in (node, f"{node}.{port}", node.partition("[")[0], f"{node.partition('[')[0]}.{port}")
    }
