"""Rows of a dataset artifact by their number, without holding them in memory."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

from posttrain_plugins.data.rows import ROWS

_BYTES = 16


class RowFile:
    """The rows of a dataset by number: where each line begins is known, the rest is read when it is asked for.

    Args:
        directory: The directory of the artifact.

    Attributes:
        hashes: A hash of the content of each row.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ROWS
        self._starts = array("Q")
        self.hashes: list[bytes] = []
        at = 0
        with self._path.open("rb") as file:
            for line in file:
                self._starts.append(at)
                self.hashes.append(hashlib.blake2b(line.rstrip(b"\n"), digest_size=_BYTES).digest())
                at += len(line)
        self._file = self._path.open("rb")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._file.seek(self._starts[number])
        row: dict[str, Any] = json.loads(self._file.readline())
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()
