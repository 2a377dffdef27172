"""Several processes on one store, some of them killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from helpers import stores

from posttrain.artifacts.gc import collect
from posttrain.artifacts.locks import attempt, held
from posttrain.artifacts.store import Store

SPAWN = multiprocessing.get_context("spawn")


def begin(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = SPAWN.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def end(process: BaseProcess) -> None:
    process.join(60)
    assert process.exitcode == 0


def test_two_processes_commit_equal_content(tmp_path: Path) -> None:
    workspace, go = tmp_path / ".posttrain", tmp_path / "go"
    ready = [tmp_path / f"ready-{number}" for number in range(2)]
    answers = [tmp_path / f"answer-{number}" for number in range(2)]
    processes = [
        begin(stores.commit_together, workspace, *pair) for pair in zip(ready, (go, go), answers, strict=True)
    ]
    for path in ready:
        stores.wait_for(path)
    go.touch()
    for process in processes:
        end(process)
    store = Store(workspace)
    assert {path.read_text() for path in answers} == set(store.digests())
    (artifact,) = store.artifacts()
    assert store.verify(artifact.digest, full=True) == []
    assert not list(store.tmp.iterdir())


def test_of_two_processes_one_builds_a_key_and_the_other_waits(tmp_path: Path) -> None:
    workspace, holding, proceed, log = (tmp_path / name for name in ("w", "holding", "proceed", "log"))
    processes = [begin(stores.build_once, workspace, "k", holding, proceed, log) for _ in range(2)]
    stores.wait_for(holding)
    stores.wait_for(log, len("waits\n"))
    assert log.read_text() == "waits\n"
    proceed.touch()
    for process in processes:
        end(process)
    assert log.read_text().splitlines() == ["waits", "builds", "reuses"]
    assert len(list(Store(workspace).artifacts())) == 1


@pytest.mark.parametrize(
    ("stall", "placing", "visible"),
    [
        (stores.stall_while_sealing, False, 0),
        (stores.stall_in_manifest, False, 0),
        (stores.stall_before_rename, True, 0),
        (stores.stall_after_rename, True, 1),
    ],
)
def test_a_killed_process_leaves_no_half_artifact_and_no_lock(
    tmp_path: Path, stall: Callable[..., None], placing: bool, visible: int
) -> None:
    store, reached = Store(tmp_path / ".posttrain"), tmp_path / "reached"
    process = begin(stall, store.workspace, "k", reached)
    stores.wait_for(reached)
    assert held(store.lock_file("k"))
    gate = attempt(store.gate)
    assert (gate is None) is placing
    if gate is not None:
        gate.close()
        assert collect(store.workspace, dry_run=False).bytes == 0
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not held(store.lock_file("k"))
    assert len(list(store.digests())) == visible
    assert [store.verify(digest, full=True) for digest in store.digests()] == [[]] * visible

    with store.lock("k"):
        digest = stores.commit(store).digest
        store.record(stores.key_record("k", {"data": digest}))
        record = store.lookup("k")
        assert record is not None
        assert store.usable(record) is None
    assert list(store.digests()) == [digest]

    journal = store.workspace / "runs" / "r1" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text('{"type": "node-started", "key": "k", "inputs": {}}\n')
    collect(store.workspace, dry_run=False)
    assert not list(store.tmp.iterdir())
    assert not list(store.works.iterdir())
    assert store.verify(digest, full=True) == []
