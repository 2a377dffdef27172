"""Numbers and truth values in files that hold text alone, such as CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.contracts.format import Row

_TRUTHS: Mapping[str, bool] = {"true": True, "false": False, "1": True, "0": False}
_LONGEST_TRUTH = 16
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,15}")


def truth_in(text: str) -> bool | None:
    """Return the truth value that a text spells: `true`, `false`, `1` or `0`; None where it spells none."""
    return None if len(text) > _LONGEST_TRUTH else _TRUTHS.get(text.strip().lower())


def number_in(text: str) -> float | None:
    """Return the number that a text spells; None where it spells none."""
    spelled = text.strip()
    if _WHOLE.fullmatch(spelled):
        return int(spelled)
    return float(spelled) if _NUMBER.fullmatch(spelled) else None


def read_scalars(row: Row, scalars: Mapping[str, type[bool] | type[float]]) -> dict[str, Any]:
    """Return a row of text with the numbers and truth values that columns hold.

    What spells none stays as it is: the format refuses it, with its row and column.

    Args:
        row: The row. Columns that were parsed as JSON may hold the numbers 0 and 1 for truth values.
        scalars: What columns hold, as `Format.scalars`.
    """
    made = dict(row)
    for column, kind in scalars.items():
        value = row.get(column)
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            found = truth_in(text) if kind is bool else number_in(text)
            made[column] = value if found is None else found
    return made
