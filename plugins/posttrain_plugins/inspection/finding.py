"""Finding what a command names: a file or directory, a stage's output, an alias, or a digest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.errors import SpecError
from posttrain.execution.naming import NAMES, named
from posttrain.wording import either, indefinite


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
        what: One of `NAMES`.
        workspace: The `.posttrain` directory.
        kinds: What it may be.

    Raises:
        SpecError: There is none, it is of another kind, or several are meant.
        StoreError: What is meant is damaged.
    """
    store = Store(workspace.absolute())
    if not store.objects.is_dir():
        raise _nothing(what, kinds, f"no artifacts in {store.workspace}")
    digest, origin = _digest(what, store, kinds)
    artifact = store.get(digest)
    if artifact.kind not in kinds:
        raise SpecError(
            "this artifact is of another kind", where=what, found=artifact.ref, expected=either(kinds)
        )
    return Found(artifact, origin)


def _digest(what: str, store: Store, kinds: Collection[Kind]) -> tuple[str, str | None]:
    meant = named(what, store)
    outputs = meant.outputs
    fitting = {name: digest for name, digest in outputs.items() if store.get(digest).kind in kinds} or outputs
    if len(set(fitting.values())) > 1:
        raise SpecError(
            "several outputs are meant",
            where=what,
            found=", ".join(sorted(fitting)),
            expected="one NODE.PORT",
        )
    if fitting:
        return next(iter(fitting.values())), meant.origin
    try:
        return store.find(what).digest, None
    except SpecError as error:
        raise _nothing(what, kinds, error.message) from error


def _nothing(what: str, kinds: Collection[Kind], found: str) -> SpecError:
    return SpecError(
        f"there is neither a file nor {indefinite(either(kinds))} of that name",
        where=what,
        found=found,
        expected=f"a path, {NAMES}",
        fix="check the name, or give the store's directory with `--workspace`",
    )
