"""Files: durable writes, walks that refuse surprises, read-only trees, and what an `OSError` means."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from posttrain.errors import StoreError

_SPACE = "free space there (`posttrain store gc --delete` removes what nothing refers to), then resume"
_RIGHTS = "make this path writable for this user, or use a workspace that is"
_MEANING: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _SPACE),
    errno.EDQUOT: ("the disk quota is used up", _SPACE),
    errno.EROFS: ("the filesystem is read-only", _RIGHTS),
    errno.EACCES: ("permission is denied", _RIGHTS),
    errno.EPERM: ("the operation is not permitted", _RIGHTS),
    errno.ENOLCK: ("the filesystem offers no file locks", "put the workspace on a local filesystem"),
    errno.EOPNOTSUPP: ("the filesystem offers no file locks", "put the workspace on a local filesystem"),
}
_WRITABLE = 0o700


@contextlib.contextmanager
def guarded(path: Path, action: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError`.

    Args:
        path: The place to name when the error names none.
        action: What is being done, to complete "could not …".
    """
    try:
        yield
    except OSError as error:
        meaning, fix = _MEANING.get(error.errno or 0, (error.strerror or str(error), "look at this path"))
        place = Path(error.filename or path)
        raise StoreError(
            f"could not {action}: {meaning}",
            where=str(place),
            found=_free(place) if fix is _SPACE else error.strerror,
            fix=fix,
        ) from error


def is_full(error: OSError) -> bool:
    """Whether the system refused to write for want of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _free(path: Path) -> str:
    for place in (path, *path.parents):
        if place.exists():
            return f"{shutil.disk_usage(place).free:,} bytes free on the filesystem of {place}"
    return "no such path"


def sync(path: Path) -> None:
    """Force a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` atomically: after a crash it holds either the old content or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def payload(directory: Path) -> dict[str, Path]:
    """Return the files below a directory by relative path, in order.

    Raises:
        StoreError: For a symbolic link, a special file, or a name that is not UTF-8.
    """
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(directory, onerror=_raise):
        for name in (*folders, *names):
            path = Path(folder, name)
            if _ordinary(path):
                found[_relative(path, directory)] = path
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def _ordinary(path: Path) -> bool:
    """Whether `path` is a regular file (else it is a directory, or refused)."""
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return stat.S_ISREG(mode)
    raise StoreError(
        "an artifact consists of regular files only",
        where=str(path),
        found=f"a symbolic link to {path.readlink()}" if stat.S_ISLNK(mode) else "a special file",
        fix="write or copy the content itself into the output directory",
    )


def _relative(path: Path, directory: Path) -> str:
    name = path.relative_to(directory).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise StoreError("this file's name is not UTF-8", where=repr(str(path)), fix="rename it") from error
    return name


def make_read_only(directory: Path) -> None:
    """Take the write permission from everything below a directory, but not from the directory itself.

    A directory that is to be renamed must stay writable: the rename changes its `..`.
    """
    for folder, folders, names in os.walk(directory):
        for name in names:
            Path(folder, name).chmod(0o444)
        for name in folders:
            Path(folder, name).chmod(0o555)


def move_away(path: Path, folder: Path) -> Path:
    """Rename a tree to a fresh name in `folder`, so that it is gone at once, and return where it is now."""
    target = folder / f"trash-{secrets.token_hex(8)}"
    if path.is_dir():
        path.chmod(_WRITABLE)
    path.rename(target)
    return target


def remove_tree(path: Path) -> None:
    """Remove a tree, read-only or not; what another process removes meanwhile is no error."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        path.chmod(_WRITABLE)
        for child in path.iterdir():
            remove_tree(child)
        path.rmdir()


def size_of(path: Path) -> int:
    """Return the bytes of the files below `path`, links not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(path) for name in names)
