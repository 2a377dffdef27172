"""First differences between two artifacts or two runs: a config key, a template line, a data digest."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import KeyRecord, Store
from posttrain.planning.keys import changes, differences, spelled

_TEXT = (".json", ".jinja", ".txt", ".jsonl", ".md")
_TEXT_LIMIT = 4 * 2**20
_LINES = 4
"""Differing lines shown of one text file."""


def compare_artifacts(store: Store, left: Artifact, right: Artifact) -> list[str]:
    """Return what differs between two artifacts: kind, facts, options that made them, files."""
    if left.digest == right.digest:
        return []
    lines = []
    if left.kind != right.kind:
        lines.append(f"kind: {left.kind} → {right.kind}")
    before, after = left.facts.model_dump(mode="json"), right.facts.model_dump(mode="json")
    lines.extend(f"facts.{path}: {a} → {b}" for path, a, b in _changes(before, after))
    lines.extend(_compare_makers(store, left, right))
    lines.extend(_compare_files(left, right))
    return lines


def compare_records(left: Mapping[str, KeyRecord], right: Mapping[str, KeyRecord]) -> list[str]:
    """Return what differs between two runs: nodes, ingredients of their keys, outputs, figures."""
    lines = []
    for node in dict.fromkeys([*left, *right]):
        if node not in left or node not in right:
            lines.append(f"{node}: only in {'the first' if node in left else 'the second'}")
            continue
        a, b = left[node], right[node]
        lines.extend(f"{node}: {change}" for change in differences(a.ingredients, b.ingredients))
        lines.extend(
            f"{node}.{port}: {a.outputs.get(port, 'absent')[:12]} → {b.outputs.get(port, 'absent')[:12]}"
            for port in dict.fromkeys([*a.outputs, *b.outputs])
            if a.outputs.get(port) != b.outputs.get(port)
        )
        lines.extend(
            f"{node}: {name} {before} → {after}" for name, before, after in _changes(a.figures, b.figures)
        )
    return lines


def _compare_makers(store: Store, left: Artifact, right: Artifact) -> Iterator[str]:
    a, b = store.provenance(left.digest), store.provenance(right.digest)
    if a is None or b is None:
        return
    if a.stage != b.stage:
        yield f"stage: {a.stage} → {b.stage}"
    for option, before, after in _changes(a.config, b.config):
        yield f"with.{option}: {before} → {after}"
    for option, before, after in _changes(a.sources, b.sources):
        yield f"the content of with.{option}: {before[:12]} → {after[:12]}"
    for port in dict.fromkeys([*a.parents, *b.parents]):
        one, other = a.parents.get(port, ()), b.parents.get(port, ())
        if one != other:
            yield f"input {port}: {_digests(one)} → {_digests(other)}"
    for name, before, after in _changes(a.versions, b.versions):
        yield f"version of {name}: {before} → {after}"


def _compare_files(left: Artifact, right: Artifact) -> Iterator[str]:
    a = {entry.path: entry for entry in left.manifest.files}
    b = {entry.path: entry for entry in right.manifest.files}
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            yield f"file {name}: only in {'the first' if name in a else 'the second'}"
        elif a[name].sha256 != b[name].sha256:
            yield f"file {name}: {a[name].sha256[:12]} → {b[name].sha256[:12]}"
            if name.endswith(_TEXT) and max(a[name].size, b[name].size) <= _TEXT_LIMIT:
                yield from _first_lines(left.file(name), right.file(name))


def _first_lines(left: Path, right: Path) -> Iterator[str]:
    before, after = (
        path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (left, right)
    )
    changed = (
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++"))
    )
    for line in itertools.islice(changed, _LINES):
        yield f"    {line[:160]}"


def _changes(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for path, before, after in changes(left, right):
        yield ".".join(path), spelled(before), spelled(after)


def _digests(values: tuple[str, ...]) -> str:
    return ", ".join(value[:12] for value in values) or "(none)"
