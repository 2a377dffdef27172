"""Scratch: directories in `store/tmp` where artifacts are written before they become objects.

Each has a lock file `<name>.lock` beside it, held by the process that writes, so that a collection can tell
what is still being written from what a killed process left behind. The lock exists before the directory.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from posttrain.artifacts.files import remove_tree
from posttrain.artifacts.locks import KeyLock, acquire, attempt, held

_owned: dict[Path, KeyLock] = {}
"""The locks of this process's scratch directories, whichever `Store` object made them."""


def create(tmp: Path, label: str) -> Path:
    """Make a fresh, empty directory that this process owns until it is committed or discarded."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", label)[:60] or "scratch"
    directory = tmp / f"{readable}-{secrets.token_hex(6)}"
    lock = acquire(lock_of(directory))
    try:
        directory.mkdir()
    except OSError:
        lock.path.unlink(missing_ok=True)
        lock.close()
        raise
    _owned[directory] = lock
    return directory


def lock_of(directory: Path) -> Path:
    """Return the path of a scratch directory's lock."""
    return directory.with_name(f"{directory.name}.lock")


def discard(directory: Path) -> None:
    """Remove a scratch directory (if it is still there) and its lock."""
    remove_tree(directory)
    lock_of(directory).unlink(missing_ok=True)
    lock = _owned.pop(directory, None)
    if lock is not None:
        lock.close()


def clear_locks(tmp: Path) -> None:
    """Remove the locks of scratch directories that are not there and that nobody is about to make."""
    for path in tmp.glob("*.lock"):
        lock = None if path.with_suffix("").exists() else attempt(path)
        if lock is not None:
            with lock:
                if not path.with_suffix("").exists():
                    path.unlink(missing_ok=True)


def living(directory: Path, since: int | None) -> bool:
    """Whether somebody may still commit this scratch directory.

    Args:
        directory: The scratch directory.
        since: When the oldest key that is being built was locked (ns), None when none is. A worker that has
            sealed its output is gone, but its parent, which holds the key, has yet to commit it.
    """
    path = lock_of(directory)
    try:
        made = path.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return held(path) or (since is not None and made >= since)
