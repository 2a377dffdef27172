from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from posttrain.artifacts import digest as module
from posttrain.artifacts.digest import DigestMemo, hash_file
from posttrain.artifacts.manifest import digest_of
from posttrain.errors import StoreError

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""sha256 of "abc", FIPS 180-2 appendix B.1."""


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counting(path: Path) -> str:
        names.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(module, "hash_file", counting)
    return names


def old_file(path: Path, data: bytes = b"abc", seconds: int = 1_000_000_000) -> Path:
    path.write_bytes(data)
    os.utime(path, (seconds, seconds))
    return path


def test_hash_of_a_known_text(tmp_path: Path) -> None:
    assert hash_file(old_file(tmp_path / "a")) == ABC


def test_a_file_is_hashed_once_also_by_another_memo_object(tmp_path: Path, hashed: list[str]) -> None:
    path = old_file(tmp_path / "a")
    database = tmp_path / "store" / "digests.sqlite"
    assert DigestMemo(database).file(path) == ABC
    assert DigestMemo(database).file(path) == ABC
    assert hashed == ["a"]
    assert DigestMemo(database).file(path, fresh=True) == ABC
    assert hashed == ["a", "a"]


@pytest.mark.parametrize("change", ["time", "size", "inode"])
def test_a_changed_file_is_hashed_again(tmp_path: Path, hashed: list[str], change: str) -> None:
    path, memo = old_file(tmp_path / "a"), DigestMemo(tmp_path / "m.sqlite")
    memo.file(path)
    if change == "time":
        old_file(path, b"xyz", 1_000_000_001)
    elif change == "size":
        old_file(path, b"abcd")
    else:
        old_file(tmp_path / "b", b"xyz").replace(path)
    assert memo.file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert hashed == ["a", "a"]


def test_a_file_written_just_now_is_not_trusted_to_its_time(tmp_path: Path) -> None:
    path, memo = tmp_path / "a", DigestMemo(tmp_path / "m.sqlite")
    for text in ("one", "two", "six", "ten") * 20:
        path.write_text(text)
        assert memo.file(path) == hashlib.sha256(text.encode()).hexdigest()


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_file(tmp_path / "a")

    def meddling(path: Path) -> str:
        found = hash_file(path)
        path.write_bytes(b"other")
        return found

    monkeypatch.setattr(module, "hash_file", meddling)
    with pytest.raises(StoreError, match="changed while it was read"):
        DigestMemo(tmp_path / "m.sqlite").file(path)


def test_renamed_files_keep_their_memo(tmp_path: Path, hashed: list[str]) -> None:
    old, new = old_file(tmp_path / "old"), tmp_path / "new"
    memo = DigestMemo(tmp_path / "m.sqlite")
    memo.file(old)
    old.rename(new)
    memo.move([(old, new)])
    assert memo.file(new) == ABC
    assert hashed == ["old"]


def test_prune_forgets_files_that_are_gone(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    gone, here = old_file(tmp_path / "gone"), old_file(tmp_path / "here")
    memo.file(gone), memo.file(here)
    gone.unlink()
    memo.prune()
    with sqlite3.connect(memo.path) as connection:
        assert connection.execute("SELECT path FROM files").fetchall() == [(str(here),)]
    connection.close()


@pytest.mark.parametrize("damage", [b"this is no database at all, not even nearly", b""])
def test_a_damaged_memo_is_begun_anew(tmp_path: Path, hashed: list[str], damage: bytes) -> None:
    path, memo = old_file(tmp_path / "a"), DigestMemo(tmp_path / "m.sqlite")
    memo.path.write_bytes(damage)
    assert [memo.file(path) for _ in range(4)] == [ABC] * 4
    assert 1 <= len(hashed) <= 2


def test_a_memo_damaged_in_the_middle_never_gives_an_error(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    paths = [old_file(tmp_path / f"f{number}") for number in range(60)]
    for path in paths:
        memo.file(path)
    data = bytearray(memo.path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    memo.path.write_bytes(data)
    assert {memo.file(path) for path in paths} == {ABC}
    assert {memo.file(path) for path in paths} == {ABC}


def test_a_memo_that_cannot_be_opened_or_written_costs_only_time(tmp_path: Path, hashed: list[str]) -> None:
    path = old_file(tmp_path / "a")
    (tmp_path / "dir.sqlite").mkdir()
    (tmp_path / "file").touch()
    for memo in (DigestMemo(tmp_path / "dir.sqlite"), DigestMemo(tmp_path / "file" / "m.sqlite")):
        assert memo.file(path) == ABC
        memo.move([(path, path)])
        memo.prune()
    assert hashed == ["a", "a"]


def test_a_read_only_memo_is_read_and_not_written(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memo, known, new = DigestMemo(tmp_path / "m.sqlite"), old_file(tmp_path / "a"), old_file(tmp_path / "b")
    memo.file(known)
    connect = sqlite3.connect
    monkeypatch.setattr(
        module.sqlite3, "connect", lambda path, timeout: connect(f"file:{path}?mode=ro", uri=True)
    )
    assert memo.file(known) == memo.file(new) == memo.file(new) == ABC
    assert hashed == ["a", "b", "b"]


def test_threads_share_a_memo(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    paths = [old_file(tmp_path / str(number), str(number).encode()) for number in range(12)]
    found: list[tuple[Path, str]] = []
    threads = [
        threading.Thread(target=lambda: found.extend((path, memo.file(path)) for path in paths))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 48
    assert all(value == hashlib.sha256(path.read_bytes()).hexdigest() for path, value in found)


def test_digest_of_a_tree_by_hand(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    old_file(tree / "sub" / "b"), old_file(tree / "sub.txt")
    memo = DigestMemo(tmp_path / "m.sqlite")
    assert memo.tree(tree) == digest_of([["sub.txt", ABC], ["sub/b", ABC]])
    assert memo.tree(tree / "sub.txt") == ABC
    (tree / "sub" / "b").rename(tree / "sub" / "c")
    assert memo.tree(tree) == digest_of([["sub.txt", ABC], ["sub/c", ABC]])


def test_a_tree_is_read_through_its_links(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    blobs, plain, linked = tmp_path / "blobs", tmp_path / "plain", tmp_path / "linked"
    for folder in (blobs, plain / "d", linked):
        folder.mkdir(parents=True)
    old_file(blobs / "1"), old_file(plain / "a"), old_file(plain / "d" / "1")
    (linked / "a").symlink_to(blobs / "1")
    (linked / "d").symlink_to(blobs)
    assert memo.tree(linked) == memo.tree(plain)


def test_links_that_lead_nowhere_or_in_circles_are_refused(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "up").symlink_to(tree)
    with pytest.raises(StoreError, match="leads back"):
        memo.tree(tree)
    (tree / "up").unlink()
    (tree / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(StoreError, match="cannot be read"):
        memo.tree(tree)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    memo = DigestMemo(tmp_path / "m.sqlite")
    os.mkfifo(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(StoreError, match="no regular file"):
        memo.tree(tmp_path / "pipe")
    with pytest.raises(StoreError, match="cannot be read"):
        memo.tree(tmp_path / "missing")
