"""Locks: `flock` on small files, released when the last process that holds the descriptor is gone.

A lock belongs to the open file, not to a process. Leaving the block therefore only closes the descriptor: an
explicit unlock would also take the lock from a worker that inherited it. Lock files may be unlinked by their
holder, so a taker checks that the file it locked is still the one at the path.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class KeyLock:
    """A held lock. Pass `fileno()` in `pass_fds` to let a child hold it too."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor that holds the lock; not inheritable unless passed on explicitly."""
        return self._descriptor

    def close(self) -> None:
        """Let go. Another process that holds the descriptor keeps the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> KeyLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def acquire(path: Path, *, shared: bool = False, on_wait: Callable[[], None] | None = None) -> KeyLock:
    """Take a lock, waiting for it if need be.

    Args:
        path: The lock file; made if it is missing, together with its directory.
        shared: Several holders may share it; they exclude an exclusive one.
        on_wait: Called once when somebody else holds the lock.

    Raises:
        OSError: When the file cannot be opened or the filesystem has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    waited = False
    while True:
        lock = KeyLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        try:
            if not _flock(lock, mode | fcntl.LOCK_NB):
                if on_wait is not None and not waited:
                    on_wait()
                waited = True
                _flock(lock, mode)
            if _current(lock):
                if not shared:
                    os.utime(lock.fileno())
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def attempt(path: Path) -> KeyLock | None:
    """Take a lock without waiting; None when somebody holds it. The file is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = KeyLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    if _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) and _current(lock):
        return lock
    lock.close()
    return None


def held(path: Path) -> bool:
    """Whether somebody holds the lock. A missing file is held by nobody."""
    try:
        lock = KeyLock(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return False
    with lock:
        return not _flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _flock(lock: KeyLock, operation: int) -> bool:
    try:
        fcntl.flock(lock.fileno(), operation)
    except BlockingIOError:
        return False
    return True


def _current(lock: KeyLock) -> bool:
    """Whether the locked file is still the one at the path; a holder may unlink it before letting go."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), lock.path.stat())
    except FileNotFoundError:
        return False
