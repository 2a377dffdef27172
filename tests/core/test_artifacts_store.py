"""What a store takes in: artifacts are sealed and committed whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from helpers.scratches import FACTS, damage, fail_with, scratch
from helpers.stores import ROWS, commit, key_record, provenance, snapshot, write

from posttrain.artifacts import digest as digest_module
from posttrain.artifacts import files as files_module
from posttrain.artifacts.digest import hash_file
from posttrain.artifacts.files import remove_tree
from posttrain.artifacts.kinds import FACTS_OF, DatasetFacts, Kind, PolicyFacts, ReportFacts
from posttrain.artifacts.manifest import digest_of
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".posttrain")


def sealed(store: Store, payload: dict[str, bytes] = ROWS) -> Path:
    directory = scratch(store, payload)
    store.seal(directory, Kind.DATASET, FACTS)
    return directory


def nothing_visible(store: Store) -> bool:
    left = [*store.objects.iterdir()] if store.objects.exists() else []
    return not left and not list(store.tmp.iterdir())


def test_a_committed_artifact_by_hand(store: Store) -> None:
    artifact = commit(store)
    entry = {
        name: {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in ROWS.items()
    }
    facts = {
        "type": "dataset",
        "format": "text",
        "columns": None,
        "rows": 1,
        "policy": None,
        "conversational": None,
        "calls": None,
        "longest": None,
        "flaws": None,
        "tokens": None,
        "log_probs": None,
    }
    content = {
        "schema_version": 1,
        "kind": "dataset",
        "facts": facts,
        "files": [entry["nested/prompts.txt"], entry["rows.jsonl"]],
    }
    assert artifact.digest == digest_of(content)
    assert artifact.path == store.objects / artifact.digest
    assert hashlib.sha256((artifact.path / "content.json").read_bytes()).hexdigest() == artifact.digest
    assert snapshot(artifact.path) == {
        *ROWS, "nested", "content.json", "provenance.json"
    }  # fmt: skip
    assert artifact.file("rows.jsonl").read_bytes() == ROWS["rows.jsonl"]
    assert store.provenance(artifact.digest) == provenance()
    assert store.verify(artifact.digest, full=True) == []
    assert not list(store.tmp.iterdir())


def test_committed_trees_are_read_only(store: Store) -> None:
    artifact = commit(store)
    for path in (artifact.path, *artifact.path.rglob("*")):
        expected = 0o555 if path.is_dir() else 0o444
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    remove_tree(artifact.path)
    assert not artifact.path.exists()


def test_provenance_is_no_part_of_the_digest_and_the_first_one_stays(store: Store) -> None:
    first = commit(store, node="one")
    second = commit(store, node="two")
    assert first == second
    kept = store.provenance(first.digest)
    assert kept is not None
    assert kept.node == "one"
    assert not list(store.tmp.iterdir())
    assert [artifact.digest for artifact in store.artifacts()] == [first.digest]


def test_a_damaged_object_is_replaced_by_an_equal_one(store: Store) -> None:
    artifact = commit(store)
    damage(artifact.file("rows.jsonl"), b"garbage")
    assert store.verify(artifact.digest)
    assert commit(store, node="again").digest == artifact.digest
    assert store.verify(artifact.digest, full=True) == []
    assert not list(store.tmp.iterdir())


def test_big_files_are_hashed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(digest_module, "hash_file", counting)
    directory = scratch(store, {"weights": b"w" * 100_000})
    os.utime(directory / "weights", (1_000_000_000, 1_000_000_000))
    store.seal(directory, Kind.DATASET, FACTS)
    artifact = store.commit(directory, provenance())
    assert store.usable(key_record("k", {"data": artifact.digest})) is None
    assert Store(store.workspace).verify(artifact.digest) == []
    assert hashed == ["weights"]
    assert store.verify(artifact.digest, full=True) == []
    assert hashed == ["weights", "weights"]


def test_the_memo_is_not_needed(store: Store) -> None:
    artifact = commit(store)
    store.memo.path.unlink(missing_ok=True)
    store.memo.path.mkdir()
    assert store.verify(artifact.digest) == []
    assert commit(store, {"other": b"1"}).digest != artifact.digest


@pytest.mark.parametrize("kind", list(Kind))
def test_facts_must_match_the_kind(store: Store, kind: Kind) -> None:
    for facts in (DatasetFacts(), PolicyFacts(), ReportFacts()):
        directory = scratch(store)
        if isinstance(facts, FACTS_OF[kind]):
            assert store.seal(directory, kind, facts).kind is kind
            store.discard(directory)
        else:
            with pytest.raises(StoreError, match=f"kind `{kind}`"):
                store.seal(directory, kind, facts)
    assert nothing_visible(store)


def test_an_empty_output_is_refused(store: Store) -> None:
    directory = store.scratch("load.data")
    (directory / "only" / "folders").mkdir(parents=True)
    with pytest.raises(StoreError, match="holds no files"):
        store.seal(directory, Kind.DATASET, FACTS)
    assert nothing_visible(store)


@pytest.mark.parametrize("target", ["/etc/hostname", "rows.jsonl", "../..", "missing"])
def test_links_are_refused(store: Store, target: str) -> None:
    directory = scratch(store)
    (directory / "nested" / "link").symlink_to(target)
    with pytest.raises(StoreError, match="regular files only") as caught:
        store.seal(directory, Kind.DATASET, FACTS)
    assert caught.value.found == f"a symbolic link to {target}"
    assert nothing_visible(store)


def test_special_files_and_unspeakable_names_are_refused(store: Store) -> None:
    directory = scratch(store)
    os.mkfifo(directory / "pipe")
    with pytest.raises(StoreError, match="regular files only"):
        store.seal(directory, Kind.DATASET, FACTS)
    directory = scratch(store)
    Path(os.fsdecode(os.fsencode(directory) + b"/\xff")).touch()
    with pytest.raises(StoreError, match="not UTF-8"):
        store.seal(directory, Kind.DATASET, FACTS)
    assert nothing_visible(store)


@pytest.mark.parametrize("name", ["content.json", "provenance.json"])
def test_the_stores_own_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="store writes this file itself"):
        sealed(store, {**ROWS, name: b"{}"})
    deeper = sealed(store, {f"deeper/{name}": b"{}"})
    assert store.verify(store.commit(deeper, provenance()).digest) == []


def test_only_scratch_is_sealed_and_committed(store: Store, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", ROWS)
    inner = sealed(store)
    link = store.tmp / "link"
    link.symlink_to(outside)
    for directory in (outside, inner / "nested", link, store.tmp / ".." / ".." / "outside"):
        for attempt in (
            lambda directory=directory: store.seal(directory, Kind.DATASET, FACTS),
            lambda directory=directory: store.commit(directory, provenance()),
            lambda directory=directory: store.discard(directory),
        ):
            with pytest.raises(StoreError, match="scratch directories"):
                attempt()
    assert snapshot(outside) == {*ROWS, "nested"}


def test_what_is_not_sealed_cannot_be_committed(store: Store) -> None:
    with pytest.raises(StoreError, match="no manifest"):
        store.commit(scratch(store), provenance())
    assert nothing_visible(store)


@pytest.mark.parametrize("change", ["content", "extra", "missing", "link", "manifest"])
def test_what_changed_after_it_was_sealed_cannot_be_committed(store: Store, change: str) -> None:
    directory = sealed(store)
    rows = directory / "rows.jsonl"
    if change == "content":
        rows.write_bytes(b'{"text":"SEA"}\n')
    elif change == "extra":
        (directory / "more").touch()
    elif change == "missing":
        rows.unlink()
    elif change == "link":
        rows.rename(directory.parent / "elsewhere")
        rows.symlink_to(directory.parent / "elsewhere")
    else:
        (directory / "content.json").write_text("{")
    with pytest.raises(StoreError):
        store.commit(directory, provenance())
    (store.tmp / "elsewhere").unlink(missing_ok=True)
    assert nothing_visible(store)


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk quota is used up")]
)
@pytest.mark.parametrize("step", ["seal", "commit"])
def test_a_full_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, message: str, step: str
) -> None:
    directory = scratch(store) if step == "seal" else sealed(store)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match=message) as caught:
        patched.setattr(files_module.os, "fsync", fail_with(number))
        if step == "seal":
            store.seal(directory, Kind.DATASET, FACTS)
        else:
            store.commit(directory, provenance())
    assert f"could not {step} an artifact" in caught.value.message
    assert "bytes free on the filesystem of" in (caught.value.found or "")
    assert "free space" in (caught.value.fix or "")
    assert nothing_visible(store)
    assert commit(store).digest in set(store.digests())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", fail_with(number))
        with pytest.raises(StoreError, match="could not begin an artifact") as caught:
            store.scratch("x")
        assert str(store.workspace) in (caught.value.where or "")
        assert "writable" in (caught.value.fix or "")
    directory = sealed(store)
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="could not commit an artifact"):
        patched.setattr(Path, "rename", fail_with(number))
        store.commit(directory, provenance())
    assert nothing_visible(store)


def test_a_store_that_cannot_be_written_can_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = commit(store)
    record = key_record("k", {"data": artifact.digest})
    store.record(record)
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", fail_with(errno.EROFS))
    assert store.lookup("k") == record
    assert store.usable(record) is None
    assert store.find(artifact.ref) == artifact
    with (
        pytest.raises(StoreError, match="could not lock a key: the filesystem is read-only"),
        store.lock("k"),
    ):
        pytest.fail("entered")


def test_reading_creates_nothing(store: Store) -> None:
    missing = "0" * 64
    assert list(store.artifacts()) == list(store.records()) == []
    assert not store.has(missing)
    assert store.lookup("k") is None
    assert store.verify(missing) != []
    with pytest.raises(StoreError, match="not in the store"):
        store.get(missing)
    assert not store.workspace.exists()
