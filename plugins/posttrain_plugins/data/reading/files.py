"""Data files: JSONL, JSON, CSV, Parquet, Arrow and saved datasets, read a row at a time.

The first three are plain Python, so that planning can read them as well as a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import DataError
from posttrain_plugins.data.reading import columnar, delimited, json_array, jsonl

Row = dict[str, Any]
Entry = tuple[str, Row]
"""A row behind its place, such as `line 7`."""
HEARD_EVERY = 1000
"""Rows between two times that reading tells how far it is."""


class Readable(Protocol):
    """Rows that can be read again and again."""

    @property
    def source(self) -> str:
        """The file or dataset, for messages."""

    @property
    def merged(self) -> bool:
        """Whether Arrow held the rows, which gives the objects of a list the keys of all of them."""

    @property
    def textual(self) -> bool:
        """Whether the file holds text alone, numbers and truth values too."""

    def entries(self) -> Iterator[Entry]:
        """Begin to read anew.

        Raises:
            DataError: The file is malformed; with line numbers.
        """


@dataclass(frozen=True)
class Over:
    """Base of what reads rows and hands them on: what is said of them stays.

    Args:
        rows: The rows.
    """

    rows: Readable

    @property
    def source(self) -> str:
        """The file or dataset, for messages."""
        return self.rows.source

    @property
    def merged(self) -> bool:
        """Whether Arrow held the rows."""
        return self.rows.merged

    @property
    def textual(self) -> bool:
        """Whether the file holds text alone."""
        return self.rows.textual


@dataclass(frozen=True)
class Heard(Over):
    """Rows whose reading tells how far it is, each time anew, and ends where a stop is asked for.

    Args:
        rows: The rows.
        pause: Called every so many rows; may raise.
    """

    pause: Callable[[int, int | None], None]

    def entries(self) -> Iterator[Entry]:
        """Begin to read anew."""
        for number, entry in enumerate(self.rows.entries()):
            if number % HEARD_EVERY == 0:
                self.pause(number, None)
            yield entry


@dataclass(frozen=True)
class Table:
    """Rows in memory and where each stands.

    Args:
        source: The file or dataset.
        rows: The rows.
        places: One for each row, such as `line 7`.
        merged: Whether Arrow held the rows.
        textual: Whether their file holds text alone.
    """

    source: str
    rows: list[Row]
    places: list[str]
    merged: bool = False
    textual: bool = False

    def entries(self) -> Iterator[Entry]:
        """Yield the rows with their places."""
        return zip(self.places, self.rows, strict=True)


@dataclass(frozen=True)
class DataFile:
    """A file or saved dataset on disk, which is read row by row.

    Args:
        source: Its name in messages.
        read: Begins to read it.
        merged: Whether Arrow held the rows.
        textual: Whether the file holds text alone.
    """

    source: str
    read: Callable[[], Iterator[Entry]]
    merged: bool = False
    textual: bool = False

    def entries(self) -> Iterator[Entry]:
        """Yield the rows with their places.

        Raises:
            DataError: The file is malformed or holds no rows.
        """
        empty = True
        for entry in self.read():
            empty = False
            yield entry
        if empty:
            raise DataError("the file holds no rows", where=self.source)


def open_file(path: Path, part: str | None = None) -> DataFile:
    """Return what reads a file or a saved dataset directory.

    Args:
        path: What to read; the suffix says how.
        part: Which split of a saved dataset that has several.

    Raises:
        DataError: The file is missing or of an unknown type.
    """
    if not path.exists():
        raise DataError(
            "there is no such file",
            where=str(path),
            fix="check `path`; it is relative to the spec file's folder",
        )
    if path.is_dir():
        source, rows = columnar.saved(path, part)
        return DataFile(source, lambda: numbered_entries(rows()), merged=True)
    suffix = path.suffix.lower()
    if suffix in _PLAIN:
        return DataFile(str(path), lambda: _PLAIN[suffix](path), textual=suffix in _TEXTUAL)
    if suffix in _COLUMNAR:
        return DataFile(str(path), lambda: numbered_entries(_COLUMNAR[suffix](path)), merged=True)
    raise DataError(
        f"cannot read files that end in `{path.suffix}`",
        where=str(path),
        expected=", ".join((*_PLAIN, *_COLUMNAR)) + ", or a directory written by `Dataset.save_to_disk`",
    )


def read_table(path: Path, part: str | None = None) -> Table:
    """Read a whole file or saved dataset into memory; as `open_file` otherwise.

    Raises:
        DataError: The file is missing, empty, of an unknown type, or malformed (with line numbers).
    """
    file = open_file(path, part)
    entries = list(file.entries())
    rows, places = [row for _, row in entries], [place for place, _ in entries]
    return Table(file.source, rows, places, file.merged, file.textual)


def is_plain(path: Path) -> bool:
    """Whether a file can be read without any library."""
    return path.is_file() and path.suffix.lower() in _PLAIN


def numbered(source: str, rows: Iterable[Row]) -> Table:
    """Return rows that Arrow held as a table; their places are their numbers."""
    listed = [dict(row) for row in rows]
    return Table(source, listed, [f"row {number}" for number in range(1, len(listed) + 1)], merged=True)


def numbered_entries(rows: Iterable[Row]) -> Iterator[Entry]:
    """Yield rows that stand on no line behind their numbers."""
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


_PLAIN: dict[str, Callable[[Path], Iterator[Entry]]] = {
    ".jsonl": jsonl.read,
    ".ndjson": jsonl.read,
    ".json": json_array.read,
    ".csv": delimited.read,
}
_TEXTUAL = frozenset({".csv"})
_COLUMNAR: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": columnar.parquet,
    ".arrow": columnar.arrow,
}
