"""A collection beside builders, dead workers and an earlier one that was interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.collected import age, dataset, finished, names
from helpers.stores import key_record, write

from posttrain.artifacts.gc import collect
from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.artifacts.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".posttrain")


def test_damaged_objects_and_records_are_collected_when_nothing_refers_to_them(store: Store) -> None:
    kept, lost = dataset(store, "kept"), dataset(store, "lost")
    finished(store, "r1", "k", kept)
    for artifact in (kept, lost):
        artifact.path.chmod(0o755)
        artifact.file("content.json").unlink()
    (store.keys / "broken.json").write_text("{")
    report = collect(store.workspace, dry_run=False)
    assert names(report, "objects") == {f"damaged:{lost.digest[:12]}"}
    assert names(report, "keys") == {"broken"}
    assert any("broken.json" in note for note in report.notes)
    assert list(store.digests()) == [kept.digest]


def test_a_key_that_is_being_built_is_never_touched(store: Store) -> None:
    for key in ("live", "dead"):
        write(store.work(key), {"state": b"1"})
        store.record(key_record(key, {}))
    old = dataset(store, "old")
    age(old.path)
    with store.lock("live"):
        placed = dataset(store, "placed but in no journal yet")
        report = collect(store.workspace, dry_run=False)
        assert names(report, "objects") == {old.ref}
        assert names(report, "keys") == names(report, "work") == {"dead"}
        assert list(store.digests()) == [placed.digest]
        assert (store.works / "live" / "state").exists()
        assert [path.name for path in store.locks.iterdir()] == ["live.lock"]
    assert names(collect(store.workspace, dry_run=False), "objects") == {placed.ref}
    assert not list(store.locks.iterdir())


@pytest.mark.parametrize("how", ["reused", "committed again"])
def test_an_old_object_that_a_builder_reuses_stays(store: Store, how: str) -> None:
    old = dataset(store, "old")
    age(old.path)
    with store.lock("live"):
        if how == "reused":
            assert store.usable(key_record("other", {"data": old.digest})) is None
        else:
            assert dataset(store, "old") == old
        assert collect(store.workspace, dry_run=False).objects == ()
    assert store.verify(old.digest, full=True) == []


def test_outputs_of_a_locked_key_stay(store: Store) -> None:
    made = dataset(store, "made")
    age(made.path)
    store.record(key_record("k", {"data": made.digest}))
    with store.lock("k"):
        assert collect(store.workspace, dry_run=False).bytes == 0
    assert names(collect(store.workspace), "keys") == {"k"}


def test_scratch_of_a_living_process_stays_and_of_a_dead_one_goes(store: Store) -> None:
    mine = write(store.scratch("mine"), {"half": b"123"})
    code = (
        "import pathlib, sys; from posttrain.artifacts.store import Store\n"
        "(Store(pathlib.Path(sys.argv[1])).scratch('theirs') / 'half').write_bytes(b'1234567')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(store.workspace)], check=True, env=environment)
    stray = store.tmp / "stray-000000000000.lock"
    stray.touch()
    report = collect(store.workspace, dry_run=False)
    assert [(item.name.split("-")[0], item.bytes) for item in report.scratch] == [("theirs", 7)]
    assert sorted(store.tmp.iterdir()) == [mine, mine.with_name(f"{mine.name}.lock")]
    store.seal(mine, Kind.DATASET, DatasetFacts())


def test_sealed_scratch_of_a_worker_that_is_gone_waits_for_its_parent(store: Store) -> None:
    code = (
        "import pathlib, sys; from posttrain.artifacts.store import Store\n"
        "from posttrain.artifacts.kinds import DatasetFacts, Kind\n"
        "store = Store(pathlib.Path(sys.argv[1])); made = store.scratch('made')\n"
        "(made / 'rows').write_text('1'); store.seal(made, Kind.DATASET, DatasetFacts()); print(made)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def work() -> Path:
        command = [sys.executable, "-c", code, str(store.workspace)]
        done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        return Path(done.stdout.strip())

    before = work()
    age(before.with_name(f"{before.name}.lock"))
    with store.lock("k"):
        sealed = work()
        assert names(collect(store.workspace, dry_run=False), "scratch") == {before.name}
        assert sealed.is_dir()
    assert names(collect(store.workspace, dry_run=False), "scratch") == {sealed.name}
    assert not list(store.tmp.iterdir())


def test_a_collection_that_was_interrupted_is_finished_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(store, "r1", "k", dataset(store, "one"))
    dataset(store, "two")

    def interrupt(path: Path) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("posttrain.artifacts.gc.remove_tree", interrupt)
        collect(store.workspace, dry_run=False, drop_runs=["r1"])
    assert list(store.digests()) == []
    assert not list((store.workspace / "runs").iterdir())
    report = collect(store.workspace, dry_run=False)
    assert len(report.scratch) == 3
    assert not list(store.tmp.iterdir())


def test_the_report_is_json(store: Store) -> None:
    dataset(store, "one")
    data = json.loads(collect(store.workspace).model_dump_json())
    assert data["dry_run"] is True
    assert set(data["objects"][0]) == {"name", "path", "bytes"}
