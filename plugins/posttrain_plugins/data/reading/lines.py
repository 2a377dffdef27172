"""Lines of a file, none of them longer than fits into memory, and files that are not what their name says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from posttrain.errors import DataError

LONGEST = 64 * 1024 * 1024
"""Bytes of the longest line, row or field that is read."""

_BOM = b"\xef\xbb\xbf"
_STARTS = {
    b"\x1f\x8b": ("gzip-compressed", "unpack it first"),
    b"PK\x03\x04": ("a ZIP archive", "unpack it first"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", "unpack it first"),
    b"BZh": ("compressed with bzip2", "unpack it first"),
    b"PAR1": ("a Parquet file", "name it `.parquet`"),
    b"ARROW1": ("an Arrow file", "name it `.arrow`"),
}
"""How files begin that are no UTF-8 text, what they are, and what to do about it."""
_UTF16 = ("text in UTF-16", "save it as UTF-8")
_WIDE = re.compile(rb"\xff\xfe[^\0]\0|\xfe\xff\0[^\0]", re.DOTALL)


def begin(file: IO[bytes], path: Path) -> None:
    """Skip a byte order mark.

    Raises:
        DataError: The file is something else than UTF-8 text.
    """
    start = file.read(8)
    known = (told for mark, told in _STARTS.items() if start.startswith(mark))
    found = _UTF16 if _WIDE.match(start) else next(known, None)
    if found is not None:
        raise DataError(f"the file is {found[0]}", where=str(path), expected="UTF-8 text", fix=found[1])
    file.seek(len(_BOM) if start.startswith(_BOM) else 0)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text file with their numbers, line breaks included.

    Raises:
        DataError: A line is longer than `LONGEST`, or the file is no text.
    """
    with path.open("rb") as file:
        begin(file, path)
        number = 1
        while line := file.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise too_long(path, f"line {number}")
            yield number, line
            number += 1


def too_long(path: Path, place: str) -> DataError:
    """Return the refusal of a line or row that is too long to be read."""
    return DataError(
        f"{place} is longer than {LONGEST // 1024**2} MiB, the most that is read at once",
        where=str(path),
        expected="one row a line in JSON Lines, or an array of rows in JSON",
        fix="split the row, or write the file with one row a line",
    )


def not_utf8(error: UnicodeDecodeError) -> str:
    """Say where text stops being UTF-8."""
    return f"byte {error.start + 1} of the line is not UTF-8 ({error.object[error.start]:#04x})"
