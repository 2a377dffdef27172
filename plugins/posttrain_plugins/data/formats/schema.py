"""What the columns of a whole dataset hold, gathered row by row in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.scalars import truth_in
from posttrain_plugins.data.formats.values import listed, type_name

_SHAPES = 64
_KEYS = 256
_OPENAI_COLUMNS = ("parallel_tool_calls", "functions", "function_call")
_OPENAI_KEYS = frozenset({"refusal", "function_call", "audio"})


@dataclass
class _Seen:
    types: Counter[str] = field(default_factory=Counter)
    keys: set[str] = field(default_factory=set)
    starts: set[str] = field(default_factory=set)
    truths: int = 0


@dataclass
class Schema:
    """The columns of the rows that were added.

    Attributes:
        rows: How many rows there were.
        shapes: How many rows have each set of columns, and the place of the first of them.
    """

    rows: int = 0
    shapes: dict[tuple[str, ...], tuple[int, str]] = field(default_factory=dict)
    _columns: dict[str, _Seen] = field(default_factory=dict)

    def add(self, row: Row, place: str) -> None:
        """Take one row into account."""
        self.rows += 1
        shape = tuple(map(str, row))
        if shape in self.shapes or len(self.shapes) < _SHAPES:
            count, first = self.shapes.get(shape, (0, place))
            self.shapes[shape] = (count + 1, first)
        for name, value in row.items():
            seen = self._columns.setdefault(str(name), _Seen())
            seen.types[type_name(value) or "null"] += 1
            _look_inside(seen, value)

    @property
    def columns(self) -> Mapping[str, Column]:
        """What each column holds."""
        return {
            name: Column(
                dict(seen.types),
                frozenset(seen.keys),
                seen.types.total(),
                self.rows,
                frozenset(seen.starts),
                seen.truths,
            )
            for name, seen in self._columns.items()
        }

    def told(self, limit: int = 4) -> str:
        """Say which columns how many rows have, the commonest first, and where the first of them stands."""
        ranked = sorted(self.shapes.items(), key=lambda item: -item[1][0])
        lines = [
            f"{count} row{'s' * (count > 1)} with {listed(shape)}, from {first}"
            for shape, (count, first) in ranked[:limit]
        ]
        if len(ranked) > limit:
            lines.append(f"{len(ranked) - limit} more sets of columns")
        return "; ".join(lines)


def schema_of(rows: Iterable[Row]) -> Schema:
    """Gather the schema of rows, whose places are their numbers."""
    schema = Schema()
    for number, row in enumerate(rows, 1):
        schema.add(row, f"row {number}")
    return schema


def holds(schema: Mapping[str, Column], column: str, *types: str) -> bool:
    """Whether a column is there and holds one of these types anywhere, or nothing but null."""
    found = schema.get(column)
    return found is not None and (
        not set(found.types) - {"null"} or any(each in found.types for each in types)
    )


def begins_with_prompt(schema: Mapping[str, Column], column: str) -> bool:
    """Whether a column holds conversations that begin with something else than the assistant's turn."""
    found = schema.get(column)
    return found is not None and bool(found.starts - {"assistant"})


def speaks_openai(schema: Mapping[str, Column]) -> bool:
    """Whether a dataset of conversations has what only OpenAI's fine-tuning files have."""
    messages = schema.get("messages")
    columns = any(column in schema for column in _OPENAI_COLUMNS)
    return columns or (messages is not None and bool(messages.keys & _OPENAI_KEYS))


def _look_inside(seen: _Seen, value: Any) -> None:
    if isinstance(value, str):
        seen.truths += truth_in(value) is not None
        return
    if isinstance(value, Mapping):
        _note(seen.keys, value)
        return
    if not isinstance(value, list):
        return
    for item in value:
        if isinstance(item, Mapping):
            _note(seen.keys, item)
    if value and isinstance(value[0], Mapping):
        role = value[0].get("role")
        if isinstance(role, str):
            _note(seen.starts, (role,))


def _note(names: set[str], found: Iterable[Any]) -> None:
    if len(names) < _KEYS:
        names.update(str(name) for name in found)
