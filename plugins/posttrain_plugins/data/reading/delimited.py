"""CSV with a header; every value is a string, and what it means is the format's business."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import DataError
from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.reading.lines import LONGEST, lines, not_utf8


def read(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield rows and the lines on which they end.

    Raises:
        DataError: The file is no CSV in UTF-8; rows with too many or few fields are collected.
    """
    problems = Problems(str(path))
    reader = csv.reader(_decoded(path), strict=True)
    rows = _rows(reader, path)
    header = _header(path, next(rows, []))
    for fields in rows:
        place = f"line {reader.line_num}"
        if not fields:
            continue
        if len(fields) != len(header):
            problems.add(place, f"{len(fields)} fields, but the header has {len(header)}")
            continue
        yield place, dict(zip(header, fields, strict=True))
    problems.check()


def _rows(reader: Iterator[list[str]], path: Path) -> Iterator[list[str]]:
    while True:
        # The limit belongs to the whole process, so it is lifted only while a row is read.
        with _long_fields():
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                line = getattr(reader, "line_num", 0)
                raise DataError(f"invalid CSV: {error}", where=f"{path}, line {line}") from error
        yield fields


def _decoded(path: Path) -> Iterator[str]:
    for number, line in lines(path):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the file is not UTF-8: {not_utf8(error)}", where=f"{path}, line {number}"
            ) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit of 131072 characters that the `csv` module puts on a field."""
    before = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _header(path: Path, names: list[str]) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError("the header names a column twice", where=f"{path}, line 1", found=", ".join(repeated))
    return names
