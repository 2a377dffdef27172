"""The dataset formats: which columns they need, how a format is recognised, what makes a row unusable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.conversation import content_text, message_problem

FORMATS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt": ("prompt",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Columns that each format needs; other columns travel along."""

_ANSWERS = frozenset({"completion", "chosen", "rejected"})
_TEXT_ONLY = frozenset({"text"})
_TURNS_ONLY = frozenset({"messages"})


def required(format: str) -> tuple[str, ...]:
    """Return the columns of a format.

    Raises:
        DataError: There is no such format.
    """
    if format not in FORMATS:
        raise DataError(f"unknown dataset format `{format}`", expected=f"one of {_listed(FORMATS)}")
    return FORMATS[format]


def infer_format(columns: Iterable[str], where: str) -> str:
    """Recognise the format from the columns of all rows.

    A format contained in another one that fits as well (`prompt` in `prompt_completion`) gives way to it.

    Raises:
        DataError: No format fits, or several do.
    """
    present = set(columns)
    fitting = {name for name, needed in FORMATS.items() if present.issuperset(needed)}
    best = [name for name in FORMATS if name in fitting and not _contained(name, fitting)]
    if len(best) == 1:
        return best[0]
    shown = _listed(sorted(present))
    if best:
        raise DataError(
            f"the columns fit several formats: {_listed(best)}",
            where=where,
            found=f"columns {shown}",
            fix=f"choose one, for example `format: {best[0]}`; the other columns travel along unused",
        )
    needs = "; ".join(f"{name}: {_listed(columns)}" for name, columns in FORMATS.items())
    raise DataError(
        "the columns fit no dataset format",
        where=where,
        found=f"columns {shown}",
        expected=needs,
        fix="rename columns, for example `columns: {question: prompt, answer: completion}`",
    )


def row_problem(row: Mapping[str, Any], format: str) -> str | None:
    """Say what makes a row unusable in its format, or return None."""
    for column in required(format):
        if column not in row:
            return f"no column `{column}`; the row has {_listed(row)}"
        problem = _value_problem(column, row[column])
        if problem:
            return f"`{column}` {problem}"
    return None


def type_name(value: Any) -> str | None:
    """Return the JSON type of a value as people call it; None for null, which fits any column."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {"str": "string", "list": "list", "dict": "object"}.get(type(value).__name__, type(value).__name__)


def _value_problem(column: str, value: Any) -> str | None:
    if isinstance(value, str):
        if column in _TURNS_ONLY:
            return "is a string, not a list of messages"
        return None if value.strip() else "is empty"
    if not isinstance(value, list) or column in _TEXT_ONLY:
        expected = "a string" if column in _TEXT_ONLY else "a string or a list of messages"
        return f"is {type_name(value) or 'null'}, not {expected}"
    return _turns_problem(column, value)


def _turns_problem(column: str, turns: Sequence[Any]) -> str | None:
    if not turns:
        return "is an empty list"
    for number, message in enumerate(turns, 1):
        problem = message_problem(message)
        if problem:
            return f"message {number} {problem}"
    if column not in _ANSWERS:
        return None
    first = turns[0]
    if first["role"] != "assistant":
        return (
            f"begins with a `{first['role']}` turn; it must hold only what follows the prompt, "
            "beginning with the assistant's turn"
        )
    if not first.get("tool_calls") and not content_text(first).strip():
        return "has an empty answer"
    return None


def _contained(name: str, fitting: set[str]) -> bool:
    own = set(FORMATS[name])
    return any(own < set(FORMATS[other]) for other in fitting)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
