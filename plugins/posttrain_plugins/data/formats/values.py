"""What makes the value of a column unusable: texts, turns and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain.wording import short
from posttrain_plugins.data.conversation import INSTEAD_OF_CONTENT, content_text, message_problem

Judge = Callable[[Any], str | None]
"""Says what is wrong with a value, to be read after its column's name, or returns None."""

MARGIN = "margin"
"""The column that says by how much the better answer of a row is better; reward models learn it where it is there."""
ALL_OR_NONE = (
    f"give every row a number, or none the column: `columns: {{{MARGIN}: OTHER}}` keeps it under another name; "
    "losses of reward models that read margins refuse them in some rows only"
)
"""What to do about margins in some rows only."""
WEIGHT = "weight"
"""What a column of weights is called where nobody says otherwise."""
_NAMED, _LONGEST_NAME = 20, 60
_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}


def type_name(value: Any) -> str | None:
    """Return the JSON type of a value as people call it; None for null, which fits any column."""
    if value is None:
        return None
    return _NAMES.get(type(value), type(value).__name__)


def listed(names: Iterable[str]) -> str:
    """Return names in backticks, or `none`; of very many or long ones, the beginning."""
    shown = [str(name) for name in names]
    told = [
        f"`{name[:_LONGEST_NAME]}…`" if len(name) > _LONGEST_NAME else f"`{name}`" for name in shown[:_NAMED]
    ]
    more = [f"{len(shown) - _NAMED} more"] if len(shown) > _NAMED else []
    return ", ".join([*told, *more]) or "none"


def counted(count: int, unit: str) -> str:
    """Return a count with what it counts, such as `3 rows`."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def first_problem(row: Mapping[str, Any], judges: Mapping[str, Judge]) -> str | None:
    """Judge columns one after the other; return the first problem, which begins with its column."""
    for column, judge in judges.items():
        if column not in row:
            return f"no column `{column}`; the row has {listed(row)}"
        problem = judge(row[column])
        if problem:
            return f"`{column}` {problem}"
    return None


def text(value: Any) -> str | None:
    """Judge a string that must say something."""
    if not isinstance(value, str):
        return _is(value, "a string")
    return None if value.strip() else "is empty"


def messages(value: Any) -> str | None:
    """Judge a list of messages."""
    if not isinstance(value, list):
        name = "a string" if isinstance(value, str) else type_name(value) or "null"
        return f"is {name}, not a list of messages"
    return turns_problem(value)


def turns(value: Any) -> str | None:
    """Judge a prompt: a string or a list of messages."""
    if isinstance(value, str):
        return text(value)
    return turns_problem(value) if isinstance(value, list) else _is(value, "a string or a list of messages")


def answer(value: Any) -> str | None:
    """Judge a completion: a string, or messages of which the first is the assistant's."""
    problem = turns(value)
    return problem if problem or isinstance(value, str) else _answer_problem(value)


def truth(value: Any) -> str | None:
    """Judge true or false."""
    return None if isinstance(value, bool) else f"is {_scalar(value)}, not true or false"


def number(value: Any) -> str | None:
    """Judge a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {_scalar(value)}, not a number"
    return None if math.isfinite(value) else f"is {value}, not a finite number"


def weight_problem(row: Mapping[str, Any], column: str) -> str | None:
    """Judge the column of what a row's values are multiplied by; a row must have it."""
    return first_problem(row, {column: _weight})


def probability(value: Any) -> str | None:
    """Judge true, false or a number from 0 to 1."""
    if isinstance(value, bool):
        return None
    if not isinstance(value, int | float):
        return f"is {_scalar(value)}, not true, false or a probability"
    return None if 0 <= value <= 1 else f"is {value}; a probability is from 0 to 1"


def margin_problem(row: Mapping[str, Any]) -> str | None:
    """Judge the column `margin` of a row, where it has one."""
    if MARGIN not in row:
        return None
    value = row[MARGIN]
    negative = "; a margin is at least 0, as it says by how much the better answer is better"
    problem = number(value) or (f"is {value}{negative}" if value < 0 else None)
    return problem and f"`{MARGIN}` {problem}"


def entries(value: Any, of: str, judge: Judge) -> str | None:
    """Judge a list of something, entry by entry; the first problem names its entry, from 1."""
    if not isinstance(value, list):
        return f"is {type_name(value) or 'null'}, not a list of {of}"
    problems = ((number, judge(each)) for number, each in enumerate(value, 1))
    return next((f"entry {number} {problem}" for number, problem in problems if problem), None)


def turns_problem(value: Sequence[Any]) -> str | None:
    """Judge a list of messages, each by itself."""
    if not value:
        return "is an empty list"
    for number, message in enumerate(value, 1):
        problem = message_problem(message)
        if problem:
            return f"message {number} {problem}"
    return None


def same_kind(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Refuse a pair of columns of which one is a string and the other holds messages."""
    first, second = columns
    if isinstance(row[first], str) == isinstance(row[second], str):
        return None
    return f"`{second}` is a {type_name(row[second])}, but `{first}` a {type_name(row[first])}"


def _answer_problem(value: Sequence[Mapping[str, Any]]) -> str | None:
    first = value[0]
    if first["role"] != "assistant":
        return (
            f"begins with a `{first['role']}` turn; it must hold only what follows the prompt, "
            "beginning with the assistant's turn"
        )
    if not content_text(first).strip() and not any(first.get(key) for key in INSTEAD_OF_CONTENT):
        return "has an empty answer"
    return None


def _weight(value: Any) -> str | None:
    return number(value) or (f"is {value}; a weight is at least 0" if value < 0 else None)


def _scalar(value: Any) -> str:
    """Return a value's type, and what it is where that is one number or text."""
    name = type_name(value) or "null"
    simple = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"the {name} {short(value)}" if simple else name


def _is(value: Any, expected: str) -> str:
    return f"is {type_name(value) or 'null'}, not {expected}"
