"""Key paths: the keys and list indices that lead to a value in nested data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KeyPath = tuple[str | int, ...]

ABSENT: Any = object()
"""Stands for a value that is not there."""


def step(data: Any, part: str | int) -> Any:
    """Return what stands under a key of a mapping or at an index of a list; `ABSENT` when nothing does."""
    if isinstance(data, Mapping):
        return data.get(part, ABSENT)
    inside = isinstance(data, list | tuple) and isinstance(part, int) and 0 <= part < len(data)
    return data[part] if inside else ABSENT


def at(data: Any, path: Sequence[str | int]) -> Any:
    """Return what a path leads to; `ABSENT` when it leads nowhere.

    >>> at({"rewards": [{"name": "judge"}]}, ("rewards", 0, "name"))
    'judge'
    >>> at({"rewards": []}, ("rewards", 0)) is ABSENT
    True
    """
    for part in path:
        data = step(data, part)
    return data


def numbered(data: Any, parts: Sequence[str]) -> KeyPath:
    """Return the parts of a dotted path, as numbers where they lead through a list.

    >>> numbered({"rewards": [{"weight": 1}]}, ["rewards", "0", "weight"])
    ('rewards', 0, 'weight')
    """
    path: list[str | int] = []
    for part in parts:
        path.append(int(part) if isinstance(data, list | tuple) and part.isdecimal() else part)
        data = step(data, path[-1])
    return tuple(path)
