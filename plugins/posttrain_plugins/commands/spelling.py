"""A pipeline as text: block YAML whose values stand on one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.planning.tree import resolve_plain

_PLAIN = re.compile(r"[A-Za-z_./][\w./@-]*")


def spelled(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML 1.2."""
    return "\n".join(_lines(data, 0)) + "\n"


def anchored(data: Any, base: Path, sources: Collection[str]) -> Any:
    """Return plain data whose paths relative to `base`, where they lead to one of `sources`, are absolute."""
    if isinstance(data, Mapping):
        return {key: anchored(value, base, sources) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [anchored(value, base, sources) for value in data]
    if not isinstance(data, str):
        return data
    whole = str((base / data).absolute())
    return whole if whole in sources else data


def _lines(data: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in data.items():
        start = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            yield start
            yield from _lines(value, depth + 1)
        else:
            yield f"{start} {flow(value)}"


def flow(value: Any) -> str:
    """Return plain data on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and resolve_plain(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
