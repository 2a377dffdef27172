"""Artifacts and records of a store: found, verified, damaged."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
from helpers.scratches import FACTS, damage, fail_with, scratch
from helpers.stores import CREATED, commit, key_record, provenance

from posttrain.artifacts import files as files_module
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.store import Store
from posttrain.errors import SpecError, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".posttrain")


def test_find_by_prefix(store: Store) -> None:
    one = commit(store)
    others = [commit(store, {"n": str(number).encode()}) for number in range(3)]
    assert store.find(one.digest[:10]) == store.find(one.ref) == store.find(one.digest) == one
    assert {store.find(other.ref).digest for other in others} == {other.digest for other in others}
    with pytest.raises(SpecError, match="no artifact"):
        store.find(f"model:{one.digest[:10]}")
    with pytest.raises(SpecError, match="too short"):
        store.find("abc")
    with pytest.raises(SpecError, match="no artifact"):
        store.find("../objects")


def test_an_ambiguous_prefix_names_the_candidates(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = commit(store), commit(store, {"n": b"1"})
    monkeypatch.setattr(Store, "digests", lambda self: iter([one.digest, two.digest]))
    monkeypatch.setattr("posttrain.artifacts.store._SHORTEST_PREFIX", 0)
    with pytest.raises(SpecError, match="several") as caught:
        store.find("dataset:")
    assert one.digest[:20] in (caught.value.found or "")
    assert two.digest[:20] in (caught.value.found or "")


def test_digests_cannot_name_other_directories(store: Store) -> None:
    for digest in ("..", "../tmp", "A" * 64, ""):
        with pytest.raises(StoreError, match="no digest"):
            store.get(digest)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.jsonl", None, "lacks a file"),
        ("rows.jsonl", b"short", "another size"),
        ("rows.jsonl", b'{"text":"SEA"}\n', "other content"),
        ("content.json", None, "no manifest"),
        ("content.json", b"{}", "cannot be read"),
        ("content.json", b"\xff\x00", "cannot be read"),
    ],
)
def test_damage_is_found_and_named(store: Store, name: str, data: bytes | None, message: str) -> None:
    artifact = commit(store)
    damage(artifact.file(name), data)
    problems = store.problems(artifact.digest)
    assert [message in problem.message for problem in problems] == [True]
    assert problems[0].where == str(artifact.file(name))
    assert problems[0].fix is not None
    assert store.verify(artifact.digest, full=True) != []
    reason = store.usable(key_record("k", {"data": artifact.digest}))
    assert reason is not None
    assert reason.startswith("output `data`:")
    assert message in reason
    assert "\n" not in reason


def test_a_manifest_that_says_something_else_is_found(store: Store) -> None:
    artifact = commit(store)
    changed = (artifact.path / "content.json").read_bytes().replace(b'"rows":1', b'"rows":2')
    damage(artifact.file("content.json"), changed)
    assert "a manifest was changed" in store.verify(artifact.digest)[0]
    with pytest.raises(StoreError, match="was changed") as caught:
        store.get(artifact.digest)
    assert caught.value.expected == artifact.digest


def test_extra_files_and_links_are_reported(store: Store) -> None:
    artifact = commit(store)
    artifact.path.chmod(0o755)
    artifact.file("extra.bin").touch()
    assert ["not in its manifest" in line for line in store.verify(artifact.digest)] == [True]
    artifact.file("extra.bin").unlink()
    artifact.file("link").symlink_to("rows.jsonl")
    assert ["regular files only" in line for line in store.verify(artifact.digest)] == [True]


def test_silent_rot_is_found_by_a_full_verification(store: Store) -> None:
    directory = scratch(store)
    os.utime(directory / "rows.jsonl", (1_000_000_000, 1_000_000_000))
    store.seal(directory, Kind.DATASET, FACTS)
    artifact = store.commit(directory, provenance())
    rows = artifact.file("rows.jsonl")
    rows.chmod(0o644)
    rows.write_bytes(b'{"text":"SEA"}\n')
    os.utime(rows, (1_000_000_000, 1_000_000_000))
    assert store.verify(artifact.digest) == []
    assert "other content" in store.verify(artifact.digest, full=True)[0]
    assert "other content" in store.verify(artifact.digest)[0]


def test_key_records_round_trip(store: Store) -> None:
    first = key_record("a" * 64, {"data": "0" * 64}, figures={"loss": math.inf, "β": 0.5}, seconds=1.5)
    second = key_record("b", {}, status="rejected", summary="no better")
    for record in (first, second):
        store.record(record)
        store.record(record)
    assert list(store.records()) == [first, second]
    assert store.lookup("b") == second
    store.record(key_record("n", {}, figures={"loss": math.nan}))
    found = store.lookup("n")
    assert found is not None
    assert math.isnan(found.figures["loss"])
    store.forget("b")
    store.forget("b")
    assert store.lookup("b") is None
    assert {path.suffix for path in store.keys.iterdir()} == {".json"}


def test_damaged_key_records_are_named(store: Store) -> None:
    store.record(key_record("k", {}))
    (store.keys / "k.json").write_text("{")
    with pytest.raises(StoreError, match="damaged") as caught:
        store.lookup("k")
    assert caught.value.where == str(store.keys / "k.json")
    (store.keys / "k.json").write_text(key_record("other", {}).model_dump_json())
    with pytest.raises(StoreError, match="another key's"):
        store.lookup("k")


def test_a_record_without_outputs_is_usable_and_one_with_a_missing_output_is_not(store: Store) -> None:
    assert store.usable(key_record("k", {})) is None
    reason = store.usable(key_record("k", {"data": "0" * 64}))
    assert reason is not None
    assert "artifact 000000000000 is not in the store" in reason


def test_a_record_cut_short_by_a_full_disk_leaves_the_old_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = key_record("k", {})
    store.record(old)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="could not record a key"):
        patched.setattr(files_module.os, "fsync", fail_with(errno.ENOSPC))
        store.record(key_record("k", {}, summary="new"))
    assert store.lookup("k") == old
    assert [path.name for path in store.keys.iterdir()] == ["k.json"]


def test_work_directories(store: Store) -> None:
    work = store.work("k")
    (work / "step-1").mkdir()
    assert store.work("k") == work == store.workspace / "work" / "k"
    assert (work / "step-1").is_dir()
    store.clear_work("k")
    store.clear_work("k")
    assert not work.exists()


def test_scratch_directories_are_fresh_and_readable(store: Store) -> None:
    one, two = store.scratch("dpo[seed=1].model"), store.scratch("dpo[seed=1].model")
    assert one != two
    assert one.name.startswith("dpo_seed_1_model-")
    assert list(one.iterdir()) == []
    store.discard(one)
    store.discard(one)
    assert sorted(store.tmp.iterdir()) == [two, two.with_name(f"{two.name}.lock")]


def test_created_times_are_kept(store: Store) -> None:
    found = store.provenance(commit(store).digest)
    assert found is not None
    assert found.created == CREATED
