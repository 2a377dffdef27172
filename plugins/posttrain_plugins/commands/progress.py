"""How far a command has read, on one line of a terminal's standard error, for files that take a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain_plugins.data.reading.files import Entry, Readable

_PAUSE = 0.5
"""Seconds between two looks, and before the first one."""
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True)
class Watched:
    """Rows that are read again and again, each time with a line that counts them.

    Args:
        inner: The rows.
    """

    inner: Readable

    @property
    def source(self) -> str:
        """The file or dataset, for messages."""
        return self.inner.source

    @property
    def merged(self) -> bool:
        """Whether Arrow held the rows."""
        return self.inner.merged

    @property
    def textual(self) -> bool:
        """Whether the file holds text alone."""
        return self.inner.textual

    def entries(self) -> Iterator[Entry]:
        """Begin to read anew."""
        return counting(self.inner.entries()) if sys.stderr.isatty() else self.inner.entries()


def counting(entries: Iterator[Entry]) -> Iterator[Entry]:
    """Yield rows, and say how many there were; the line is gone when the last was read."""
    said, shown = time.monotonic(), False
    try:
        for count, entry in enumerate(entries):
            if time.monotonic() - said > _PAUSE:
                sys.stderr.write(f"{_CLEAR}{count} rows read")
                sys.stderr.flush()
                said, shown = time.monotonic(), True
            yield entry
    finally:
        if shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
