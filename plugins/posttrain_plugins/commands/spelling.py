"""A pipeline as text: block YAML whose values stand on one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.planning.tree import resolve_plain

_PLAIN = re.compile(r"[A-Za-z_./][\w./@-]*")


def spelled(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML 1.2."""
    return "\n".join(_lines(data, 0)) + "\n"


def _lines(data: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in data.items():
        start = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            yield start
            yield from _lines(value, depth + 1)
        else:
            yield f"{start} {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and resolve_plain(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
