"""Small artifacts, and functions that other processes run on a store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts import digest, files
from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.artifacts.manifest import Artifact, Provenance
from posttrain.artifacts.store import KeyRecord, Store

CREATED = "2025-01-02T03:04:05.000+00:00"
ROWS = {"rows.jsonl": b'{"text":"sea"}\n', "nested/prompts.txt": b"0123456789abcdef\n"}


def provenance(node: str = "load", key: str = "k") -> Provenance:
    return Provenance(
        stage="data.load", node=node, port="data", key=key, run="r1", parents={}, created=CREATED
    )


def write(directory: Path, payload: Mapping[str, bytes]) -> Path:
    for name, data in payload.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def commit(
    store: Store,
    payload: Mapping[str, bytes] = ROWS,
    kind: Kind = Kind.DATASET,
    facts: Any = None,
    node: str = "load",
) -> Artifact:
    directory = write(store.scratch(f"{node}.data"), payload)
    store.seal(directory, kind, facts or DatasetFacts(format="text", rows=1))
    return store.commit(directory, provenance(node))


def key_record(key: str, outputs: Mapping[str, str], **changes: Any) -> KeyRecord:
    values: dict[str, Any] = {
        "key": key,
        "uses": "data.load",
        "node": "load",
        "run": "r1",
        "ingredients": {"stage": "data.load", "numerics": 1},
        "outputs": dict(outputs),
        "status": "completed",
        "created": CREATED,
    }
    return KeyRecord(**(values | changes))


def snapshot(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


def wait_for(path: Path, size: int = 0) -> None:
    """Wait until a file is there, with at least `size` bytes."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.01)


def commit_together(workspace: Path, ready: Path, go: Path, answer: Path) -> None:
    """Seal, wait for the other process, commit, and say which digest came out."""
    store = Store(workspace)
    directory = write(store.scratch("twin"), ROWS)
    store.seal(directory, Kind.DATASET, DatasetFacts(format="text", rows=1))
    ready.touch()
    wait_for(go)
    answer.write_text(store.commit(directory, provenance(answer.name)).digest)


def build_once(workspace: Path, key: str, holding: Path, proceed: Path, log: Path) -> None:
    """What a run does with a key: lock it, look it up, build it when it is new."""
    store = Store(workspace)
    with store.lock(key, on_wait=lambda: _say(log, "waits")):
        found = store.lookup(key)
        if found is not None and store.usable(found) is None:
            _say(log, "reuses")
            return
        holding.touch()
        wait_for(proceed)
        store.record(key_record(key, {"data": commit(store).digest}))
        _say(log, "builds")


def _say(log: Path, word: str) -> None:
    with log.open("a") as file:
        file.write(f"{word}\n")


def stall_while_sealing(workspace: Path, key: str, reached: Path) -> None:
    """Hold a key and stop for ever in the middle of hashing."""
    _stall(digest, "hash_file", reached)
    _build_forever(workspace, key)


def stall_before_rename(workspace: Path, key: str, reached: Path) -> None:
    """Hold a key and stop for ever just before the artifact would become visible."""
    _stall(Path, "rename", reached)
    _build_forever(workspace, key)


def stall_after_rename(workspace: Path, key: str, reached: Path) -> None:
    """Hold a key and stop for ever just after the artifact became visible."""
    _stall(digest.DigestMemo, "move", reached)
    _build_forever(workspace, key)


def stall_in_manifest(workspace: Path, key: str, reached: Path) -> None:
    """Hold a key and stop for ever while the manifest is forced to disk."""
    _stall(files.os, "fsync", reached)
    _build_forever(workspace, key)


def _stall(owner: Any, name: str, reached: Path) -> None:
    def stop(*_: Any, **__: Any) -> None:
        reached.touch()
        while True:
            time.sleep(60)

    setattr(owner, name, stop)


def _build_forever(workspace: Path, key: str) -> None:
    store = Store(workspace)
    with store.lock(key):
        store.work(key)
        commit(store)
    os._exit(3)
