"""Collecting what nothing refers to.

Kept are the artifacts that a run's journal or the registry of aliases names, the outputs of the keys that a
run names, and the base of every adapter that is kept. A policy that generated a dataset and the parents in a
provenance are not kept for that alone.

A key that is being built is never touched. Its builder may have placed or reused objects that no journal
names yet; it did so after it locked the key, so whatever was used since the oldest held lock was taken stays.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from posttrain.artifacts import scratch
from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.files import guarded, move_away, remove_tree, size_of
from posttrain.artifacts.locks import acquire, attempt, held
from posttrain.artifacts.store import Store
from posttrain.errors import SpecError, StoreError

_JOURNAL = "journal.jsonl"
_RUN_LOCK = "run.lock"
_HASH = re.compile(rb"[0-9a-f]{64}")


class Removed(BaseModel):
    """One thing that a collection removes: how it is called and the bytes it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    path: str
    bytes: int


class GcReport(BaseModel):
    """What a collection removed, or would remove.

    Args:
        dry_run: Nothing was removed.
        objects: Artifacts, named by their reference (`model:3f2c9a1b04de`).
        keys: Key records, named by their key.
        work: Work directories, named by their key.
        scratch: Artifacts that were never finished.
        runs: Run directories that were asked to be dropped.
        kept: Number of artifacts that stay.
        notes: What was found damaged on the way.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dry_run: bool
    objects: tuple[Removed, ...] = ()
    keys: tuple[Removed, ...] = ()
    work: tuple[Removed, ...] = ()
    scratch: tuple[Removed, ...] = ()
    runs: tuple[Removed, ...] = ()
    kept: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes freed in total."""
        parts = (self.objects, self.keys, self.work, self.scratch, self.runs)
        return sum(item.bytes for part in parts for item in part)


def collect(workspace: Path, dry_run: bool = True, drop_runs: Sequence[str] = ()) -> GcReport:
    """Remove the objects, key records, work directories and scratch that nothing refers to.

    Args:
        workspace: The `.posttrain` directory.
        dry_run: Only report.
        drop_runs: Runs that no longer count; their directories are removed too.

    Raises:
        SpecError: When a run to drop is unknown.
        StoreError: When a run to drop has not ended, or the registry is damaged, so that nobody
            can tell what it refers to. Of a damaged journal every digest that can be read is kept.
    """
    store = Store(workspace)
    if not store.workspace.is_dir():
        return GcReport(dry_run=dry_run)
    with guarded(store.root, "collect"):
        with acquire(store.gate):
            report = _Survey(store, drop_runs).report(dry_run)
            if dry_run:
                return report
            # Runs go before what they refer to: whatever interrupts this leaves no run without its outputs.
            trash = [move_away(Path(item.path), store.tmp) for item in (*report.runs, *report.objects)]
            report = _remove_keys(store, report)
            for item in report.scratch:
                scratch.discard(Path(item.path))
            scratch.clear_locks(store.tmp)
        for path in trash:
            remove_tree(path)
        store.memo.prune()
    return report


def _remove_keys(store: Store, report: GcReport) -> GcReport:
    """Remove records, work directories and idle locks, except of keys that somebody has locked meanwhile."""
    idle = {path.stem for path in _children(store.locks)}
    busy: set[str] = set()
    for key in sorted(idle | {item.name for item in (*report.keys, *report.work)}):
        lock = attempt(store.locks / f"{key}.lock")
        if lock is None:
            busy.add(key)
            continue
        with lock:
            for item in (*report.keys, *report.work):
                if item.name == key:
                    remove_tree(Path(item.path))
            lock.path.unlink(missing_ok=True)
    spared: dict[str, Any] = {
        "keys": tuple(item for item in report.keys if item.name not in busy),
        "work": tuple(item for item in report.work if item.name not in busy),
    }
    return report.model_copy(update=spared)


@dataclass
class _Run:
    """What one run's journal refers to."""

    path: Path
    ended: bool = False
    damage: str | None = None
    digests: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


class _Survey:
    """One look at a workspace, taken while nobody places an object."""

    def __init__(self, store: Store, drop_runs: Sequence[str]) -> None:
        self.store = store
        # Before the journals: a key that is let go in between has its end in the journal by then.
        self.locked, self.since = _held_keys(store)
        runs = {path.name: _read_run(path) for path in _children(store.workspace / "runs") if _is_run(path)}
        self.dropped = [_droppable(name, runs) for name in dict.fromkeys(drop_runs)]
        staying = [run for run in runs.values() if run not in self.dropped]
        self.notes = [run.damage for run in staying if run.damage is not None]
        self.run_keys = {key for run in staying for key in run.keys}
        self.outputs = self._outputs()
        self.kept = self._kept({digest for run in staying for digest in run.digests})

    def report(self, dry_run: bool) -> GcReport:
        """Name everything that is not kept."""
        return GcReport(
            dry_run=dry_run,
            objects=tuple(_removed(*pair) for pair in self._objects()),
            keys=tuple(_removed(key, self.store.keys / f"{key}.json") for key in self._keys()),
            work=tuple(
                _removed(path.name, path) for path in _children(self.store.works) if self._idle(path.name)
            ),
            scratch=tuple(_removed(path.name, path) for path in self._scratch()),
            runs=tuple(_removed(run.path.name, run.path) for run in self.dropped),
            kept=len(self.kept & set(self.store.digests())),
            notes=tuple(self.notes),
        )

    def _outputs(self) -> dict[str, set[str]]:
        """Return the outputs of every key record; a damaged record has none, and nobody can use it."""
        found: dict[str, set[str]] = {}
        for key in self.store.record_keys():
            try:
                record = self.store.lookup(key)
            except StoreError as error:
                self.notes.append(str(error))
                found[key] = set()
                continue
            found[key] = set(record.outputs.values()) if record else set()
        return found

    def _kept(self, roots: set[str]) -> set[str]:
        kept = roots | Aliases(self.store.workspace).referenced()
        for key in (self.run_keys | self.locked) & self.outputs.keys():
            kept |= self.outputs[key]
        if self.since is not None:
            kept |= {digest for digest in self.store.digests() if self._used(digest) >= self.since}
        waiting = list(kept)
        while waiting:
            base = self._base(waiting.pop())
            if base is not None and base not in kept:
                kept.add(base)
                waiting.append(base)
        return kept

    def _used(self, digest: str) -> int:
        return (self.store.objects / digest).stat().st_mtime_ns

    def _base(self, digest: str) -> str | None:
        """Return the base of an adapter. A damaged adapter can never be used again, so it keeps none."""
        if not self.store.has(digest):
            return None
        try:
            base = getattr(self.store.get(digest).facts, "base", None)
        except StoreError as error:
            self.notes.append(str(error))
            return None
        return None if base is None else str(base)

    def _objects(self) -> Iterator[tuple[str, Path]]:
        for digest in self.store.digests():
            if digest not in self.kept:
                try:
                    name = self.store.get(digest).ref
                except StoreError:
                    name = f"damaged:{digest[:12]}"
                yield name, self.store.objects / digest

    def _keys(self) -> Iterator[str]:
        for key, outputs in self.outputs.items():
            whole = bool(outputs) and outputs <= self.kept
            if not (whole or key in self.run_keys or key in self.locked):
                yield key

    def _idle(self, key: str) -> bool:
        """Whether a work directory is of no use: its key is recorded, or no run names it."""
        return key not in self.locked and (key in self.outputs or key not in self.run_keys)

    def _scratch(self) -> Iterator[Path]:
        for path in _children(self.store.tmp):
            if path.suffix != ".lock" and not scratch.living(path, self.since):
                yield path


def _children(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _is_run(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _removed(name: str, path: Path) -> Removed:
    return Removed(name=name, path=str(path), bytes=size_of(path))


def _held_keys(store: Store) -> tuple[set[str], int | None]:
    """Return the keys that somebody holds, and since when the oldest is held (ns)."""
    files = [path for path in _children(store.locks) if path.suffix == ".lock" and held(path)]
    since = min((path.stat().st_mtime_ns for path in files), default=None)
    return {path.stem for path in files}, since


def _droppable(name: str, runs: dict[str, _Run]) -> _Run:
    run = runs.get(name)
    if run is None:
        raise SpecError(
            "there is no such run", found=name, expected=f"one of {', '.join(sorted(runs)) or 'none'}"
        )
    abandoned = run.damage is not None and not held(run.path / _RUN_LOCK)
    if not run.ended and not abandoned:
        raise StoreError(
            "this run has not ended",
            where=str(run.path),
            found="no end in its journal: it is running, or was killed and can be resumed",
            fix=f"`posttrain resume {name}` brings it to its end; then drop it",
        )
    return run


def _read_run(path: Path) -> _Run:
    run = _Run(path)
    for number, line in enumerate(_lines(path / _JOURNAL), start=1):
        entry = _entry(line)
        if entry is None:
            _salvage(run, line, number)
        else:
            _NOTED.get(entry["type"], _nothing)(run, entry)
    return run


def _salvage(run: _Run, line: bytes, number: int) -> None:
    """Keep whatever a damaged line may refer to: everything in it that looks like a digest or a key."""
    found = {text.decode() for text in _HASH.findall(line)}
    run.digests |= found
    run.keys |= found
    place = f"{run.path / _JOURNAL}:{number}"
    run.damage = f"{place}: this journal is damaged; kept is what can be read, or drop run {run.path.name}"


def _nothing(run: _Run, entry: dict[str, Any]) -> None:
    """Take no note of an entry that refers to nothing."""


def _started(run: _Run, entry: dict[str, Any]) -> None:
    run.ended = False


def _ended(run: _Run, entry: dict[str, Any]) -> None:
    run.ended = True


def _node(run: _Run, entry: dict[str, Any]) -> None:
    inputs: Iterable[Sequence[str]] = entry.get("inputs", {}).values()
    run.digests.update(digest for port in inputs for digest in port)
    run.digests.update(entry.get("outputs", {}).values())
    if entry.get("key") is not None:
        run.keys.add(entry["key"])


_NOTED: dict[str, Callable[[_Run, dict[str, Any]], None]] = {
    "run-started": _started,
    "run-ended": _ended,
    "node-started": _node,
    "node-ended": _node,
}


def _lines(path: Path) -> list[bytes]:
    """Return a journal's lines without a torn last one; a run without a journal refers to nothing."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().split(b"\n")[:-1]
    return []


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return a line's entry, or None when it is damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None
