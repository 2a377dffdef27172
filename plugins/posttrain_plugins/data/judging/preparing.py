"""Rows of a file as their columns are called here: renamed, and with JSON text parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.reading.files import Entry, Over, Row

_WORDS = {"True": True, "False": False, "None": None}
"""How Python writes what JSON writes in small letters; CSV files that pandas made hold these."""


@dataclass(frozen=True)
class Prepared(Over):
    """Rows with their columns renamed and their JSON text parsed.

    Args:
        rows: What is read.
        columns: New names of columns, by their old names.
        json_columns: Columns whose text is JSON to be parsed, by their new names.
    """

    columns: Mapping[str, str]
    json_columns: tuple[str, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """Begin to read anew.

        Raises:
            RowsRefused: A row lacks a column that is renamed, or its JSON text is none.
        """
        if not self.columns and not self.json_columns:
            yield from self.rows.entries()
            return
        problems = Problems(self.source)
        for place, row in self.rows.entries():
            problem = _renaming_problem(row, self.columns) if self.columns else None
            renamed = {self.columns.get(name, name): value for name, value in row.items()}
            problem = problem or _parse_json(renamed, self.json_columns)
            if problem:
                problems.add(place, problem)
            else:
                yield place, renamed
        problems.check()


def _renaming_problem(row: Row, names: Mapping[str, str]) -> str | None:
    missing = [name for name in names if name not in row]
    if missing:
        return f"no column `{missing[0]}` to rename; the row has {', '.join(map(str, row))}"
    clashing = [new for new in names.values() if new in row and new not in names]
    return f"`columns` would replace the column `{clashing[0]}`, which is there already" if clashing else None


def _parse_json(row: Row, columns: tuple[str, ...]) -> str | None:
    """Replace JSON text by what it says; return what is wrong with it."""
    for column in columns:
        text = row.get(column)
        if not isinstance(text, str):
            continue
        try:
            row[column] = _WORDS[text] if text in _WORDS else json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            return f"`{column}` is not valid JSON: {error}"
    return None
