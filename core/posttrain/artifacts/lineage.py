"""Where an artifact comes from: back to data files, generators and base models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.manifest import Artifact, Provenance, canonical
from posttrain.artifacts.store import Store
from posttrain.keypath import ABSENT, at, numbered

_LONGEST = 160


@dataclass(frozen=True)
class Ancestor:
    """An artifact with who made it and what it was made from.

    Args:
        artifact: The artifact.
        provenance: Who made it first, where that is known.
        parents: The artifacts it was made from, by input port.
        lost: Digests of those that are not in the store any more, by input port.
        seen: It was shown further up already, so its parents are left out.
    """

    artifact: Artifact
    provenance: Provenance | None
    parents: tuple[tuple[str, Ancestor], ...]
    lost: tuple[tuple[str, str], ...] = ()
    seen: bool = False

    def lines(self, depth: int = 0, port: str = "") -> Iterator[str]:
        """Yield the tree as indented lines."""
        made, indent = self.provenance, "  " * (depth + 1)
        label = f"{port}: " if port else ""
        by = "" if made is None else f"  made by {made.node} ({made.stage}), run {made.run}"
        yield f"{'  ' * depth}{label}{self.artifact.ref}{by}{'  (see above)' if self.seen else ''}"
        if made is not None and not self.seen:
            for option, digest in made.sources.items():
                yield f"{indent}source: {_option(made.config, option)}  sha256 {digest[:12]}"
            if not made.parents and made.config:
                yield f"{indent}with: {_brief(made.config)}"
        for name, parent in self.parents:
            yield from parent.lines(depth + 1, name)
        for name, digest in self.lost:
            yield f"{indent}{name}: {digest[:12]}  (no longer in the store)"

    def as_dict(self) -> dict[str, Any]:
        """Return the tree for `--json`."""
        return {
            "artifact": self.artifact.digest,
            "kind": self.artifact.kind.value,
            "provenance": None if self.provenance is None else self.provenance.model_dump(mode="json"),
            "parents": [{"port": port, **parent.as_dict()} for port, parent in self.parents],
            "lost": [{"port": port, "artifact": digest} for port, digest in self.lost],
        }


def ancestry(store: Store, digest: str) -> Ancestor:
    """Return the tree of an artifact's ancestors; shared ancestors are expanded once.

    Raises:
        StoreError: The artifact is absent, or one of the tree is damaged.
    """
    return _ancestor(store, digest, set())


def _ancestor(store: Store, digest: str, seen: set[str]) -> Ancestor:
    artifact, made = store.get(digest), store.provenance(digest)
    if made is None or digest in seen:
        return Ancestor(artifact, made, (), seen=digest in seen)
    seen.add(digest)
    parents = [(port, parent) for port, several in made.parents.items() for parent in several]
    there = tuple((port, _ancestor(store, parent, seen)) for port, parent in parents if store.has(parent))
    lost = tuple((port, parent) for port, parent in parents if not store.has(parent))
    return Ancestor(artifact, made, there, lost)


def _option(config: Mapping[str, Any], path: str) -> Any:
    """Return the option at a dotted path, or the path itself where the record lacks it."""
    found = at(config, numbered(config, path.split(".")))
    return path if found is ABSENT else found


def _brief(config: Mapping[str, Any]) -> str:
    given = {name: value for name, value in config.items() if value is not None}
    text = canonical(given).decode()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
