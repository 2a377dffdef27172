"""From what a file holds to the rows of a dataset: renaming, recognising the format, judging every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.errors import DataError
from posttrain_plugins.data.files import Row, Table
from posttrain_plugins.data.formats import infer_format, row_problem, type_name
from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.rows import encode_row
from posttrain_plugins.data.splits import sample


@dataclass(frozen=True)
class Cleaned:
    """Rows that suit their format.

    Args:
        rows: The rows.
        format: Their format.
        duplicates: How many rows equal an earlier one.
    """

    rows: list[Row]
    format: str
    duplicates: int


def clean(
    table: Table, *, format: str | None, columns: Mapping[str, str], drop_duplicates: bool, limit: int | None
) -> Cleaned:
    """Rename columns, find the format, judge every row, and thin out.

    Args:
        table: What was read.
        format: The format; None recognises it from the columns of all rows.
        columns: New names of columns, by their old names.
        drop_duplicates: Keep the first of equal rows only.
        limit: Keep this many rows, chosen by their content.

    Raises:
        DataError: The format cannot be told, or rows do not suit it; each with its place.
    """
    rows = _renamed(table, columns) if columns else table.rows
    found = format or infer_format({column for row in rows for column in row}, table.source)
    _judge(table, rows, found)
    first = _first_of_equals(table, rows)
    duplicates = len(rows) - len(first)
    if drop_duplicates:
        rows = [rows[index] for index in first]
    return Cleaned([rows[index] for index in sample(rows, limit)], found, duplicates)


def _renamed(table: Table, names: Mapping[str, str]) -> list[Row]:
    problems = Problems(table.source)
    rows = []
    for place, row in zip(table.places, table.rows, strict=True):
        missing = [name for name in names if name not in row]
        clashing = [new for new in names.values() if new in row and new not in names]
        if missing:
            problems.add(place, f"no column `{missing[0]}` to rename; the row has {', '.join(map(str, row))}")
        elif clashing:
            problems.add(place, f"`columns` would replace the column `{clashing[0]}`, which is there already")
        rows.append({names.get(name, name): value for name, value in row.items()})
    problems.check()
    return rows


def _judge(table: Table, rows: Sequence[Row], format: str) -> None:
    problems = Problems(table.source)
    types: dict[str, tuple[str, str]] = {}
    for place, row in zip(table.places, rows, strict=True):
        problem = row_problem(row, format) or _mixed(row, place, types)
        if problem:
            problems.add(place, problem)
    problems.check()


def _mixed(row: Row, place: str, types: dict[str, tuple[str, str]]) -> str | None:
    """Compare a row's types with those of the first row that had each column; null fits any."""
    for column, value in row.items():
        name = type_name(value)
        if name is None:
            continue
        expected, where = types.setdefault(column, (name, place))
        if name != expected:
            return f"`{column}` is a {name}, but a {expected} at {where}"
    return None


def _first_of_equals(table: Table, rows: Sequence[Row]) -> list[int]:
    problems = Problems(table.source)
    seen: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        try:
            seen.setdefault(encode_row(row, table.places[index]), index)
        except DataError as error:
            problems.add(table.places[index], error.message)
    problems.check()
    return list(seen.values())
