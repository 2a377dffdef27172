from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.artifacts.locks import acquire, attempt, held
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError


def test_a_lock_excludes_and_is_released(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "k.lock"
    assert not held(path)
    with acquire(path):
        assert held(path)
        assert attempt(path) is None
    assert not held(path)
    assert path.exists()


def test_shared_holders_exclude_only_an_exclusive_one(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    with acquire(path, shared=True), acquire(path, shared=True):
        assert attempt(path) is None
    with acquire(path):
        assert held(path)


def test_waiting_is_told_once(tmp_path: Path) -> None:
    store, told, entered = Store(tmp_path), threading.Event(), threading.Event()
    calls: list[str] = []

    def wait() -> None:
        calls.append("wait")
        told.set()

    def second() -> None:
        with store.lock("k", on_wait=wait):
            entered.set()

    with store.lock("k", on_wait=lambda: calls.append("never")):
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(30)
        assert not entered.is_set()
    thread.join(30)
    assert entered.is_set()
    assert calls == ["wait"]


def waiting_child(**options: Any) -> subprocess.Popen[bytes]:
    """Start a process that says when it is up, and ends when its input does."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"
    return child


def test_a_child_that_was_given_the_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock("k") as lock:
        assert not os.get_inheritable(lock.fileno())
        child = waiting_child(pass_fds=[lock.fileno()])
    try:
        assert held(store.lock_file("k"))
    finally:
        child.communicate(timeout=30)
    assert not held(store.lock_file("k"))


def test_a_child_that_was_not_given_the_descriptor_does_not_keep_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock("k"):
        child = waiting_child(close_fds=False)
    try:
        assert not held(store.lock_file("k"))
    finally:
        child.communicate(timeout=30)


def test_an_error_in_the_block_releases_the_lock(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError), store.lock("k"):
        raise RuntimeError
    assert not held(store.lock_file("k"))


def test_a_lock_file_unlinked_by_its_holder_is_made_anew(tmp_path: Path) -> None:
    path, waits, got = tmp_path / "k.lock", threading.Event(), []
    first = acquire(path)

    def second() -> None:
        with acquire(path, on_wait=waits.set) as lock:
            got.append(os.path.samestat(os.fstat(lock.fileno()), path.stat()))
            got.append(held(path))

    thread = threading.Thread(target=second)
    thread.start()
    assert waits.wait(30)
    path.unlink()
    first.close()
    thread.join(30)
    assert got == [True, True]


def test_keys_cannot_name_other_files(tmp_path: Path) -> None:
    for key in ("../k", "a/b", "", "k.json"):
        with pytest.raises(StoreError, match="no key"), Store(tmp_path).lock(key):
            pytest.fail("entered")


def test_a_filesystem_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="no file locks") as caught, Store(tmp_path).lock("k"):
        pytest.fail("entered")
    assert caught.value.fix == "put the workspace on a local filesystem"
