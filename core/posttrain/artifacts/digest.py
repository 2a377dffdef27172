"""Digests of files and trees, memoised so that a big file is read once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import StoreError

_TABLE = (
    "CREATE TABLE IF NOT EXISTS files"
    " (path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, inode INTEGER, sha256 TEXT) WITHOUT ROWID"
)
_DAMAGED = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_BUSY_SECONDS = 5.0
_TICK_NS = 20_000_000
"""Longer than the grain of file times: within it, a second write may leave size and time as they were."""


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestMemo:
    """Remembers the sha256 of files by path, size, modification time and inode.

    It only saves time: when the memo cannot be read or written, files are hashed; when it is damaged, it is
    begun anew. Safe for several processes and threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, path: Path, *, fresh: bool = False) -> str:
        """Return the sha256 of a file; symbolic links are followed.

        Args:
            path: The file.
            fresh: Hash it in any case (and remember the result).

        Raises:
            StoreError: When it is no readable file, or changes while it is read.
        """
        path = path.absolute()
        before = _regular(path)
        if not fresh and (known := self._recall(path, before)) is not None:
            return known
        try:
            found = hash_file(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if _identity(_regular(path)) != _identity(before):
            raise StoreError(
                "this file changed while it was read", where=str(path), fix="let its writer finish first"
            )
        if time.time_ns() - before.st_mtime_ns > _TICK_NS:
            self._write(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)",
                [(str(path), *_identity(before), found)],
            )
        return found

    def tree(self, path: Path) -> str:
        """Return the digest of a file (its sha256) or of a directory (that of its sorted paths and sha256s).

        Raises:
            StoreError: When something in it is neither a file nor a directory, or a link leads back up.
        """
        if not path.is_dir():
            return self.file(path)
        return digest_of(
            sorted((file.relative_to(path).as_posix(), self.file(file)) for file in _files(path, ()))
        )

    def move(self, pairs: Sequence[tuple[Path, Path]]) -> None:
        """Carry what is known over to the new paths of files that were renamed."""
        rows = [(str(new.absolute()), str(old.absolute())) for old, new in pairs]
        self._write("UPDATE OR REPLACE files SET path = ? WHERE path = ?", rows)

    def prune(self) -> None:
        """Forget the files that are gone."""
        paths = [path for (path,) in self._read("SELECT path FROM files", ())]
        self._write(
            "DELETE FROM files WHERE path = ?", [(path,) for path in paths if not Path(path).exists()]
        )

    def _recall(self, path: Path, info: os.stat_result) -> str | None:
        query = "SELECT sha256 FROM files WHERE path = ? AND size = ? AND mtime = ? AND inode = ?"
        rows = self._read(query, (str(path), *_identity(info)))
        return str(rows[0][0]) if rows else None

    def _read(self, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        rows: list[tuple[Any, ...]] = []
        with self._tolerant(), self._connection() as connection:
            rows = connection.execute(query, parameters).fetchall()
        return rows

    def _write(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        if not rows:
            return
        with self._tolerant():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connection() as connection, connection:
                connection.execute(_TABLE)
                connection.executemany(statement, rows)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # One connection for each operation: none is shared between threads or across a fork.
        with contextlib.closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS)) as connection:
            yield connection

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Let no trouble with the memo out; a file that is no database any more makes room for a new one."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                with contextlib.suppress(OSError):
                    self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
                    self.path.unlink(missing_ok=True)
        except OSError:
            # The memo's directory cannot be made: a store that cannot be written is read without a memo.
            return


def _identity(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ino


def _regular(path: Path) -> os.stat_result:
    try:
        info = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(info.st_mode):
        raise StoreError("this is no regular file", where=str(path), expected="a regular file")
    return info


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        "this file cannot be read",
        where=str(path),
        found=error.strerror,
        fix="check that it exists and may be read",
    )


def _files(directory: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files below a directory, following links as a reader of the directory would."""
    place = directory.resolve()
    if place in above:
        raise StoreError(
            "this link leads back to a directory above it", where=str(directory), fix="remove the link"
        )
    for child in sorted(directory.iterdir()):
        if child.is_dir():
            yield from _files(child, (*above, place))
        else:
            yield child
