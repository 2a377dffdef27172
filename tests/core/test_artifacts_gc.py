"""What a collection removes and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.collected import age, dataset, finished, names, node_ended, start
from helpers.stores import commit, key_record, snapshot, write

from posttrain.artifacts import gc
from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.gc import GcReport, collect
from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.artifacts.locks import acquire
from posttrain.artifacts.store import Store
from posttrain.errors import SpecError, StoreError
from posttrain.execution.journal import NodeStarted, RunEnded, RunNote


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".posttrain")


def node_started(key: str, inputs: dict[str, list[str]]) -> NodeStarted:
    return NodeStarted(node="n", uses="u", key=key, attempt=1, config={}, inputs=inputs)


def test_nothing_there(store: Store) -> None:
    assert collect(store.workspace) == GcReport(dry_run=True)
    assert not store.workspace.exists()


def test_what_no_run_refers_to_is_removed(store: Store) -> None:
    used, unused = dataset(store, "used"), dataset(store, "unused")
    finished(store, "r1", "used-key", used)
    store.record(key_record("unused-key", {"data": unused.digest}))
    write(store.work("unused-key"), {"state": b"12345"})
    before = snapshot(store.workspace)

    planned = collect(store.workspace)
    assert planned.dry_run
    assert snapshot(store.workspace) - before <= {"store/gc.lock"}

    report = collect(store.workspace, dry_run=False)
    assert report.model_copy(update={"dry_run": True}) == planned
    assert names(report, "objects") == {unused.ref}
    assert names(report, "keys") == names(report, "work") == {"unused-key"}
    assert report.work[0].bytes == 5
    assert report.objects[0].bytes > len("unused")
    assert report.bytes == sum(item.bytes for item in (*report.objects, *report.keys, *report.work))
    assert report.kept == 1
    assert list(store.digests()) == [used.digest]
    assert [record.key for record in store.records()] == ["used-key"]
    assert not list(store.works.iterdir())
    assert not list(store.tmp.iterdir())
    assert store.verify(used.digest, full=True) == []
    assert collect(store.workspace).bytes == 0


def test_a_run_that_was_killed_keeps_what_it_was_using(store: Store) -> None:
    given, made = dataset(store, "given"), dataset(store, "made")
    journal = start(store, "r1")
    journal.append(node_ended("done", {"data": made.digest}))
    journal.append(RunNote(message="hello"))
    journal.append(node_started("half", {"data": [given.digest, made.digest]}))
    journal.path.write_bytes(journal.path.read_bytes() + b'{"type": "node-en')
    store.record(key_record("done", {"data": made.digest}))
    write(store.work("half"), {"step-10": b"checkpoint"})
    write(store.work("done"), {"step-10": b"left over"})
    report = collect(store.workspace, dry_run=False)
    assert names(report, "objects") == names(report, "keys") == set()
    assert names(report, "work") == {"done"}
    assert set(store.digests()) == {given.digest, made.digest}
    assert (store.works / "half" / "step-10").exists()


def test_registered_versions_stay_without_any_run(store: Store) -> None:
    champion, other = dataset(store, "champion"), dataset(store, "other")
    Aliases(store.workspace).register("helper", champion.digest, "r0", "promote", {})
    store.record(key_record("k", {"data": champion.digest}))
    store.record(key_record("both", {"a": champion.digest, "b": other.digest}))
    report = collect(store.workspace, dry_run=False)
    assert names(report, "objects") == {other.ref}
    assert names(report, "keys") == {"both"}
    assert list(store.digests()) == [champion.digest]


def test_outputs_recorded_for_a_key_that_a_run_names_stay(store: Store) -> None:
    made = dataset(store, "made")
    start(store, "r1").append(node_started("k", {}))
    store.record(key_record("k", {"data": made.digest}))
    assert collect(store.workspace, dry_run=False).objects == ()


def test_the_base_of_a_kept_adapter_stays_but_not_the_policy_of_a_dataset(store: Store) -> None:
    root = commit(store, {"w": b"root"}, Kind.MODEL, PolicyFacts(layers=1))
    middle = commit(store, {"w": b"middle"}, Kind.ADAPTER, PolicyFacts(base=root.digest))
    adapter = commit(store, {"w": b"adapter"}, Kind.ADAPTER, PolicyFacts(base=middle.digest))
    policy = commit(store, {"w": b"policy"}, Kind.MODEL, PolicyFacts(layers=2))
    rows = commit(store, {"r": b"rows"}, Kind.DATASET, DatasetFacts(rows=1, policy=policy.digest))
    finished(store, "r1", "k", adapter, rows)
    report = collect(store.workspace, dry_run=False)
    assert names(report, "objects") == {policy.ref}
    assert set(store.digests()) == {root.digest, middle.digest, adapter.digest, rows.digest}


def test_dropping_a_run_frees_what_only_it_used(store: Store) -> None:
    shared, own = dataset(store, "shared"), dataset(store, "own")
    finished(store, "r1", "k1", shared, own)
    finished(store, "r2", "k2", shared)
    planned = collect(store.workspace, drop_runs=["r1"])
    assert names(planned, "runs") == {"r1"}
    assert names(planned, "objects") == {own.ref}
    assert (store.workspace / "runs" / "r1").is_dir()
    report = collect(store.workspace, dry_run=False, drop_runs=["r1", "r1"])
    assert names(report, "keys") == {"k1"}
    assert len(report.runs) == 1
    assert [path.name for path in (store.workspace / "runs").iterdir()] == ["r2"]
    assert list(store.digests()) == [shared.digest]
    assert not list(store.tmp.iterdir())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_has_not_ended_is_not_dropped(store: Store, resumed: bool) -> None:
    made = dataset(store, "made")
    journal = start(store, "r1")
    journal.append(node_ended("k", {"data": made.digest}))
    if resumed:
        journal.append(RunEnded(status="interrupted"))
        start(store, "r1")
    with pytest.raises(StoreError, match="has not ended") as caught:
        collect(store.workspace, dry_run=False, drop_runs=["r1"])
    assert "posttrain resume r1" in (caught.value.fix or "")
    with pytest.raises(SpecError, match="no such run"):
        collect(store.workspace, dry_run=False, drop_runs=["../runs/r1"])
    assert list(store.digests()) == [made.digest]


def damage(journal: Path) -> None:
    """Make every line unreadable; what it refers to still stands in it."""
    journal.write_bytes(journal.read_bytes().replace(b'{"time"', b'"time"'))


def test_a_damaged_journal_is_noted_and_what_can_be_read_in_it_stays(store: Store) -> None:
    made, other = dataset(store, "made"), dataset(store, "other")
    finished(store, "r1", "a" * 64, made)
    journal = store.workspace / "runs" / "r1" / "journal.jsonl"
    damage(journal)
    report = collect(store.workspace, dry_run=False)
    (note,) = report.notes
    assert note.startswith(f"{journal}:3: this journal is damaged")
    assert list(store.digests()) == [made.digest] and store.lookup("a" * 64) is not None
    assert names(report, "objects") == {other.ref}


def test_a_run_with_a_damaged_journal_can_be_dropped_unless_it_lives(store: Store) -> None:
    made = dataset(store, "made")
    finished(store, "r1", "a" * 64, made)
    directory = store.workspace / "runs" / "r1"
    damage(directory / "journal.jsonl")
    with acquire(directory / "run.lock"), pytest.raises(StoreError, match="has not ended"):
        collect(store.workspace, dry_run=False, drop_runs=["r1"])
    collect(store.workspace, dry_run=False, drop_runs=["r1"])
    assert not directory.exists() and list(store.digests()) == []


def test_a_node_that_ends_during_the_survey_keeps_its_outputs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is looked at first, a key is found locked or its end is found in the journal."""
    journal = start(store, "r1")
    old = dataset(store, "old")
    age(old.path)
    lock = acquire(store.lock_file("k"))
    looks = 0

    def ending(look: Any) -> Any:
        def once(*arguments: Any) -> Any:
            nonlocal looks
            found = look(*arguments)
            looks += 1
            if looks == 1:
                journal.append(node_ended("k", {"data": old.digest}))
                lock.close()
            return found

        return once

    monkeypatch.setattr(gc, "_held_keys", ending(gc._held_keys))
    monkeypatch.setattr(gc, "_read_run", ending(gc._read_run))
    assert collect(store.workspace, dry_run=False).objects == ()
    assert looks == 2 and list(store.digests()) == [old.digest]


def test_a_damaged_registry_stops_the_collection(store: Store) -> None:
    made = dataset(store, "made")
    finished(store, "r1", "k", made)
    (store.workspace / "aliases").mkdir()
    (store.workspace / "aliases" / "helper.json").write_text("[]")
    with pytest.raises(StoreError, match="registry file is damaged"):
        collect(store.workspace, dry_run=False)
    assert list(store.digests()) == [made.digest]
