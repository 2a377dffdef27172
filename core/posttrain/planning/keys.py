"""The key of a node: the hash of everything that may change its outputs, and nothing else.

The ingredients are kept beside the key, so "stale because …" is a comparison of two dictionaries.
Library versions, devices and threads are recorded as drift and never keyed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.digest import DigestMemo
from posttrain.artifacts.manifest import digest_of
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import SourceMark
from posttrain.errors import DataError
from posttrain.keypath import ABSENT
from posttrain.planning.nodes import Node
from posttrain.planning.secrets import is_reference
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices, keyed, marked, semantic

_LONGEST = 80
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        "environment": {name: value for name, value in node.runtime.env.items() if not is_reference(value)},
    }


def plugin_identities(uses: str, config: Any, catalogue: Catalogue) -> dict[str, Any]:
    """Return the identity of a stage and every component its options name; the worker must have the same."""
    stage = catalogue.identity(Group.STAGE, uses)
    shared, place = catalogue.shared(uses), keyed(config)
    return {
        "stage": {**stage, "shared": shared} if shared else stage,
        "components": {
            _dotted(place(path)): catalogue.identity(group, choice.name)
            for path, choice, group in choices(config, volatile=False)
        },
    }


def source_digests(config: Any, base: Path, memo: DigestMemo) -> dict[str, str]:
    """Return the content digest of every local source an option names, by the option's path in the key."""
    found: dict[str, str] = {}
    place = keyed(config)
    for path, value in marked(config, SourceMark):
        if value is None or place(path) is None:
            continue
        source = base / str(value)
        if not source.exists():
            raise DataError(
                "this source does not exist",
                where=_dotted(path),
                found=source,
                expected="a readable file or directory",
                fix="correct the path; relative paths start at the pipeline file's directory",
            )
        found[_dotted(place(path))] = memo.tree(source)
    return found


def _dotted(path: Sequence[str | int] | None) -> str:
    return ".".join(map(str, path or ()))


def key_of(ingredients: Mapping[str, Any]) -> str:
    """Return the key: the sha256 of the canonical ingredients."""
    return digest_of(dict(ingredients))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say in words what changed between two sets of ingredients."""
    found = list(changes(old, new))
    # That another component was chosen stands among the options already.
    chosen_anew = {path[:2] for path, _, _ in found if path[0] == "components" and path[2:] in _OTHER}
    lines = (
        _WORDS.get(path[0], _other_words)(".".join(path[1:]), before, after)
        for path, before, after in found
        if len(path) == 1 or path[:2] not in chosen_anew
    )
    return list(dict.fromkeys(lines))


_OTHER: tuple[tuple[str, ...], ...] = ((), ("name",))
"""Where the identity of a component differs when it is another one."""


def _plugin_words(name: str, before: Any, after: Any) -> str:
    option, _, part = name.rpartition(".")
    if not option:
        return f"its plugins: {spelled(before)} → {spelled(after)}"
    return f"plugin of with.{option}: {part} {_identity(before)} → {_identity(after)}"


def _stage_words(name: str, before: Any, after: Any) -> str:
    return f"plugin: {name} {_identity(before)} → {_identity(after)}"


def _identity(value: Any) -> str:
    """Return a part of a plugin's identity, digests of its source as short as the plan shows them."""
    return spelled(value[:8] if isinstance(value, str) and _DIGEST.fullmatch(value) else value)


def _other_words(name: str, before: Any, after: Any) -> str:
    return f"{name or 'its ingredients'}: {spelled(before)} → {spelled(after)}"


_WORDS: Mapping[str, Callable[[str, Any, Any], str]] = {
    "config": lambda name, before, after: f"with.{name}: {spelled(before)} → {spelled(after)}",
    "stage": _stage_words,
    "components": _plugin_words,
    "sources": lambda name, before, after: f"the content of with.{name} changed",
    "inputs": lambda name, before, after: f"input {name} changed ({_digests(before)} → {_digests(after)})",
    "environment": lambda name, before, after: f"runtime.env.{name}: {spelled(before)} → {spelled(after)}",
}


Change = tuple[tuple[str, ...], Any, Any]


def changes(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield the path of every difference between two nested mappings, with what is there on each side."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from changes(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))
    elif old != new or type(old) is not type(new):
        yield path, old, new


def spelled(value: Any) -> str:
    """Return a value as it would stand in a file, long ones shortened."""
    if value is ABSENT:
        return "(absent)"
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _digests(value: Any) -> str:
    return ", ".join(str(item)[:12] for item in value) if isinstance(value, list) else spelled(value)
