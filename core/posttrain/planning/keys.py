"""The key of a node: the hash of everything that may change its outputs, and nothing else.

The ingredients are kept beside the key, so "stale because …" is a comparison of two dictionaries.
Library versions, devices and threads are recorded as drift and never keyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.digest import DigestMemo
from posttrain.artifacts.manifest import digest_of
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import SourceMark
from posttrain.errors import DataError
from posttrain.planning.graph import Node
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices, marked, semantic


def key_ingredients(
    node: Node, catalogue: Catalogue, input_digests: Mapping[str, Sequence[str]], base: Path, memo: DigestMemo
) -> dict[str, Any]:
    """Collect what determines a node's outputs.

    Args:
        node: The node.
        catalogue: Gives the identity of the stage and of every component its options name.
        input_digests: Artifact digests by port.
        base: Directory that relative source paths are resolved against.
        memo: Hashes source files once.

    Raises:
        DataError: A source file does not exist.
    """
    return {
        **plugin_identities(node.uses, node.config, catalogue),
        "config": semantic(node.config),
        "sources": source_digests(node.config, base, memo),
        "inputs": {port: list(digests) for port, digests in sorted(input_digests.items())},
        "environment": dict(node.runtime.env),
    }


def plugin_identities(uses: str, config: Any, catalogue: Catalogue) -> dict[str, Any]:
    """Return the identity of a stage and every component its options name; the worker must have the same."""
    return {
        "stage": catalogue.identity(Group.STAGE, uses),
        "components": {
            ".".join(map(str, path)): catalogue.identity(group, choice.name)
            for path, choice, group in choices(config)
        },
    }


def source_digests(config: Any, base: Path, memo: DigestMemo) -> dict[str, str]:
    """Return the content digest of every local source an option names, by option path."""
    found: dict[str, str] = {}
    for path, value in marked(config, SourceMark):
        if value is None:
            continue
        source = base / str(value)
        if not source.exists():
            raise DataError(
                "this source does not exist",
                where=".".join(map(str, path)),
                found=source,
                expected="a readable file or directory",
                fix="correct the path; relative paths start at the pipeline file's directory",
            )
        found[".".join(map(str, path))] = memo.tree(source)
    return found


def key_of(ingredients: Mapping[str, Any]) -> str:
    """Return the key: the sha256 of the canonical ingredients."""
    return digest_of(dict(ingredients))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say in words what changed between two sets of ingredients, most telling first."""
    lines = []
    for path, before, after in _changes((), old, new):
        head, *rest = path
        name = ".".join(rest)
        if head == "inputs":
            lines.append(f"input {rest[0]} changed ({_brief(before)} → {_brief(after)})")
        elif head == "sources":
            lines.append(f"source file {name} changed")
        elif head == "config":
            lines.append(f"with.{name}: {_show(before)} → {_show(after)}")
        elif head in ("stage", "components"):
            lines.append(f"plugin {'.'.join(path)}: {_show(before)} → {_show(after)}")
        else:
            lines.append(f"{'.'.join(path)}: {_show(before)} → {_show(after)}")
    return lines


_ABSENT = object()


def _changes(path: tuple[str, ...], old: Any, new: Any) -> list[tuple[tuple[str, ...], Any, Any]]:
    if old == new:
        return []
    if (
        isinstance(old, Mapping)
        and isinstance(new, Mapping)
        and not (path and path[0] == "inputs" and len(path) > 1)
    ):
        keys = sorted({*old, *new}, key=str)
        return [
            change
            for key in keys
            for change in _changes((*path, str(key)), old.get(key, _ABSENT), new.get(key, _ABSENT))
        ]
    return [(path, old, new)]


def _show(value: Any) -> str:
    return "(absent)" if value is _ABSENT else repr(value)


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item)[:12] for item in value)
    return _show(value)
