"""Where an artifact comes from: back to data files, generators and base models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.manifest import Artifact, Provenance
from posttrain.artifacts.store import Store


@dataclass(frozen=True)
class Ancestor:
    """An artifact with who made it and what it was made from.

    Args:
        artifact: The artifact.
        provenance: Who made it first, where that is known.
        parents: The artifacts it was made from, by input port.
        seen: It was shown further up already, so its parents are left out.
    """

    artifact: Artifact
    provenance: Provenance | None
    parents: tuple[tuple[str, Ancestor], ...]
    seen: bool = False

    def lines(self, depth: int = 0, port: str = "") -> Iterator[str]:
        """Yield the tree as indented lines."""
        made = self.provenance
        label = f"{port}: " if port else ""
        by = "" if made is None else f"  made by {made.node} ({made.stage}), run {made.run}"
        yield f"{'  ' * depth}{label}{self.artifact.ref}{by}{'  (see above)' if self.seen else ''}"
        if made is not None and not self.seen:
            for option, digest in made.sources.items():
                path = made.config.get(option.split(".")[0], option)
                yield f"{'  ' * (depth + 1)}source: {path}  sha256 {digest[:12]}"
        for name, parent in self.parents:
            yield from parent.lines(depth + 1, name)

    def as_dict(self) -> dict[str, Any]:
        """Return the tree for `--json`."""
        return {
            "artifact": self.artifact.digest,
            "kind": self.artifact.kind.value,
            "provenance": None if self.provenance is None else self.provenance.model_dump(mode="json"),
            "parents": [{"port": port, **parent.as_dict()} for port, parent in self.parents],
        }


def ancestry(store: Store, digest: str) -> Ancestor:
    """Return the tree of an artifact's ancestors; shared ancestors are expanded once."""
    return _ancestor(store, digest, set())


def _ancestor(store: Store, digest: str, seen: set[str]) -> Ancestor:
    artifact, made = store.get(digest), store.provenance(digest)
    if digest in seen:
        return Ancestor(artifact, made, (), seen=True)
    seen.add(digest)
    parents = (
        [] if made is None else [(port, parent) for port, many in made.parents.items() for parent in many]
    )
    return Ancestor(
        artifact,
        made,
        tuple((port, _ancestor(store, parent, seen)) for port, parent in parents if store.has(parent)),
    )
