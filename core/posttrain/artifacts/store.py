"""The content-addressed store of artifacts and the cache of what each key gave.

An artifact is written in `store/tmp`, sealed there, and becomes visible by one rename to
`store/objects/<digest>`. Objects never change. A key record says which outputs a key gave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.artifacts import scratch, sealing
from posttrain.artifacts.digest import DigestMemo
from posttrain.artifacts.files import guarded, make_read_only, move_away, remove_tree, sync, write_durably
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.locks import KeyLock, acquire
from posttrain.artifacts.manifest import CONTENT, PROVENANCE, Artifact, Manifest, Provenance, canonical
from posttrain.artifacts.records import KeyRecord, read_record
from posttrain.errors import SpecError, StoreError

__all__ = ["KeyRecord", "Store"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SHORTEST_PREFIX = 4
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_DENIED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})


class Store:
    """The artifacts and key records of one workspace (the `.posttrain` directory). Looking up makes nothing.

    Safe for several processes and threads. Whoever builds or reuses what a key gives holds `lock(key)` from
    the look-up until the outputs are in the run's journal; a collection then leaves them alone.
    """

    def __init__(self, workspace: Path) -> None:
        self.workspace = Path(workspace).absolute()
        self.root = self.workspace / "store"
        self.objects = self.root / "objects"
        self.keys = self.root / "keys"
        self.tmp = self.root / "tmp"
        self.locks = self.root / "locks"
        self.works = self.workspace / "work"
        self.gate = self.root / "gc.lock"
        """Shared by whoever places or reuses an object, exclusive for a collection while it decides."""
        self.memo = DigestMemo(self.root / "digests.sqlite")

    # Objects

    def digests(self) -> Iterator[str]:
        """Yield the digests of all objects, damaged ones included, in order."""
        if self.objects.is_dir():
            yield from sorted(path.name for path in self.objects.iterdir() if _DIGEST.fullmatch(path.name))

    def artifacts(self) -> Iterator[Artifact]:
        """Yield all artifacts; raises `StoreError` at one whose manifest is damaged."""
        return map(self.get, self.digests())

    def has(self, digest: str) -> bool:
        """Whether an object of this digest is there. Does not verify it."""
        return (self._object(digest) / CONTENT).is_file()

    def get(self, digest: str) -> Artifact:
        """Return an artifact.

        Raises:
            StoreError: When it is absent or its manifest is not the one the digest stands for.
        """
        path = self._object(digest)
        if not path.is_dir():
            raise _absent(digest, path)
        return Artifact(digest, sealing.read_manifest(path, digest), path)

    def find(self, prefix: str) -> Artifact:
        """Return the one artifact whose digest begins so; `model:3f2c9a1b` is understood too.

        Raises:
            SpecError: When there is none, or more than one.
            StoreError: When an artifact that begins so is damaged.
        """
        kind, _, start = prefix.strip().rpartition(":")
        if len(start) < _SHORTEST_PREFIX:
            raise SpecError(
                "this prefix is too short",
                found=prefix,
                expected=f"at least {_SHORTEST_PREFIX} digits of the digest",
            )
        found = [self.get(digest) for digest in self.digests() if digest.startswith(start)]
        found = [artifact for artifact in found if kind in ("", artifact.kind.value)]
        if len(found) == 1:
            return found[0]
        if not found:
            fix = "`posttrain store ls` lists all"
            raise SpecError("no artifact has this digest", found=prefix, fix=fix)
        matches = ", ".join(f"{artifact.kind}:{artifact.digest[:20]}" for artifact in found)
        raise SpecError("several artifacts begin so", found=matches, expected="one", fix="give more digits")

    def provenance(self, digest: str) -> Provenance | None:
        """Return who made an artifact first; None when it does not say."""
        path = self._object(digest) / PROVENANCE
        try:
            return Provenance.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StoreError("a provenance file is damaged", where=str(path), found=error) from error

    def _object(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StoreError("this is no digest", found=digest, expected="64 hexadecimal digits")
        return self.objects / digest

    # Writing

    def scratch(self, label: str) -> Path:
        """Make a fresh directory in `store/tmp` to write an artifact in.

        It lives as long as this process, or the key under which it was made is locked; then it is collected.
        """
        with guarded(self.tmp, "begin an artifact"):
            return scratch.create(self.tmp, label)

    def discard(self, directory: Path) -> None:
        """Remove a scratch directory that will not be committed. It may be gone already."""
        self._require_scratch(directory)
        with guarded(directory, "remove a scratch directory"):
            scratch.discard(directory)

    def seal(self, directory: Path, kind: Kind, facts: Any) -> Manifest:
        """Hash a scratch directory's files, write its `content.json` and force everything to disk.

        Raises:
            StoreError: When the content is refused or cannot be written; the scratch is then removed.
        """
        self._require_scratch(directory)
        with _discarding(directory), guarded(directory, "seal an artifact"):
            return sealing.seal(directory, kind, facts, self.memo)

    def commit(self, sealed: Path, provenance: Provenance) -> Artifact:
        """Make a sealed directory an object, by one rename. Equal content that is there is kept instead.

        Raises:
            StoreError: When it is not what its manifest says or cannot be written; the scratch is then
                removed.
        """
        self._require_scratch(sealed)
        with _discarding(sealed), guarded(self.objects, "commit an artifact"):
            digest = sealing.read_manifest(sealed).digest
            if wrong := sealing.problems(sealed, digest, self.memo):
                raise wrong[0]
            write_durably(sealed / PROVENANCE, canonical(provenance.model_dump(mode="json")))
            make_read_only(sealed)
            with self.shared():
                self._place(sealed, digest)
            scratch.discard(sealed)
        return self.get(digest)

    def _place(self, sealed: Path, digest: str) -> None:
        self.objects.mkdir(parents=True, exist_ok=True)
        if self._renamed(sealed, digest):
            return
        with acquire(self.root / "mend.lock"):
            target = self._object(digest)
            if not sealing.problems(target, digest, self.memo):
                _touch(target)
                return
            damaged = move_away(target, self.tmp)
            self._renamed(sealed, digest)
            remove_tree(damaged)

    def _renamed(self, sealed: Path, digest: str) -> bool:
        """Rename to the object's place unless it is taken."""
        target = self._object(digest)
        files = [path.relative_to(sealed) for path in sealed.rglob("*") if path.is_file()]
        try:
            sealed.rename(target)
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            raise
        target.chmod(0o555)
        sync(self.objects)
        self.memo.move([(sealed / file, target / file) for file in files])
        return True

    def _require_scratch(self, directory: Path) -> None:
        if directory.parent.resolve() != self.tmp.resolve() or directory.is_symlink():
            raise StoreError(
                "artifacts are written in the store's scratch directories",
                where=str(directory),
                expected=f"a directory in {self.tmp}",
                fix="write into the directory that the store gave for this output",
            )

    # Verification

    def verify(self, digest: str, full: bool = False) -> list[str]:
        """Return everything that is wrong with an artifact, one line each.

        Args:
            digest: The artifact.
            full: Hash every file again instead of trusting size, time and inode.
        """
        return [_line(problem) for problem in self.problems(digest, full)]

    def problems(self, digest: str, full: bool = False) -> list[StoreError]:
        """Return everything that is wrong with an artifact, ready to be raised."""
        path = self._object(digest)
        if not path.is_dir():
            return [_absent(digest, path)]
        return sealing.problems(path, digest, self.memo, full)

    def usable(self, record: KeyRecord) -> str | None:
        """Return None when every output of a record exists and verifies, else why not."""
        for port, digest in sorted(record.outputs.items()):
            with self.shared():
                _touch(self._object(digest))
            if wrong := self.problems(digest):
                return f"output `{port}`: {_line(wrong[0])}"
        return None

    # Keys

    def record(self, record: KeyRecord) -> None:
        """Write what a key gave, atomically. A record of the same key is replaced."""
        path = self._key_file(record.key)
        with guarded(path, "record a key"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, record.model_dump_json(indent=1).encode())

    def lookup(self, key: str) -> KeyRecord | None:
        """Return what a key gave, None when it was never built.

        Raises:
            StoreError: When the record is damaged.
        """
        return read_record(self._key_file(key), key)

    def record_keys(self) -> Iterator[str]:
        """Yield the keys that have a record, damaged ones included, in order."""
        if self.keys.is_dir():
            yield from sorted(path.stem for path in self.keys.glob("*.json") if _KEY.fullmatch(path.stem))

    def records(self) -> Iterator[KeyRecord]:
        """Yield all key records; raises `StoreError` at a damaged one."""
        for key in self.record_keys():
            if (record := self.lookup(key)) is not None:
                yield record

    def forget(self, key: str) -> None:
        """Remove a key's record, if there is one."""
        path = self._key_file(key)
        with guarded(path, "forget a key"):
            path.unlink(missing_ok=True)

    def work(self, key: str) -> Path:
        """Return `work/<key>`, the scratch of a node that survives a crash; made if it is missing."""
        path = self.works / _checked(key)
        with guarded(path, "make a work directory"):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def clear_work(self, key: str) -> None:
        """Remove `work/<key>`, if it is there."""
        path = self.works / _checked(key)
        with guarded(path, "clear a work directory"):
            remove_tree(path)

    def _key_file(self, key: str) -> Path:
        return self.keys / f"{_checked(key)}.json"

    # Locks

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[KeyLock]:
        """Hold a key while it is looked up and built; waits while another process or thread holds it.

        A child that was given the descriptor (`pass_fds=[lock.fileno()]`) goes on holding it after the block.

        Args:
            key: The key.
            on_wait: Called once if somebody else holds it.
        """
        path = self.lock_file(key)
        with guarded(path, "lock a key"):
            lock = acquire(path, on_wait=on_wait)
        with lock:
            yield lock

    def lock_file(self, key: str) -> Path:
        """Return the path of a key's lock."""
        return self.locks / f"{_checked(key)}.lock"

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keep collections out for a moment."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(acquire(self.gate, shared=True))
            except OSError as error:
                # In a store that this process cannot write, it cannot place anything either: it only reads.
                if error.errno not in _DENIED:
                    raise
            yield


@contextlib.contextmanager
def _discarding(directory: Path) -> Iterator[None]:
    """Remove a scratch directory when the block refuses it; a collection gets what cannot be removed now."""
    try:
        yield
    except StoreError:
        with contextlib.suppress(OSError):
            scratch.discard(directory)
        raise


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise StoreError("this is no key", found=key, expected="letters, digits, - and _")
    return key


def _touch(path: Path) -> None:
    """Mark an object as used now: a collection spares it while a key locked earlier is still being built."""
    try:
        os.utime(path)
    except OSError as error:
        if error.errno not in _DENIED:
            raise


def _absent(digest: str, path: Path) -> StoreError:
    return StoreError(f"artifact {digest[:12]} is not in the store", where=str(path), fix=sealing.REBUILD)


def _line(error: StoreError) -> str:
    parts = [
        f"found {error.found}" if error.found else "",
        f"expected {error.expected}" if error.expected else "",
    ]
    details = "; ".join(part for part in (error.where or "", *parts) if part)
    return " ".join(f"{error.message} ({details})".split())
