from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest
from helpers.stores import commit

from posttrain.artifacts import files as files_module
from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError


@pytest.fixture
def digests(tmp_path: Path) -> list[str]:
    store = Store(tmp_path)
    return [commit(store, {"n": str(number).encode()}).digest for number in range(3)]


def test_versions_count_up_and_the_same_artifact_keeps_its_version(
    tmp_path: Path, digests: list[str]
) -> None:
    aliases = Aliases(tmp_path)
    assert aliases.names() == aliases.versions("helper") == aliases.history("helper", "champion") == []
    assert aliases.register("helper", digests[0], "r1", "promote", {"win": 0.5}) == 1
    assert aliases.register("helper", digests[1], "r2", "promote", {}) == 2
    assert aliases.register("helper", digests[0], "r3", "promote", {"win": 0.9}) == 1
    assert aliases.register("other", digests[2], "r3", "promote", {}) == 1
    first, second = Aliases(tmp_path).versions("helper")
    assert (first.version, first.digest, first.run, first.figures) == (1, digests[0], "r1", {"win": 0.5})
    assert (second.version, second.digest, second.run, second.node) == (2, digests[1], "r2", "promote")
    assert aliases.names() == ["helper", "other"]
    assert aliases.referenced() == set(digests)


def test_an_alias_moves_by_compare_and_set_and_leaves_history(tmp_path: Path, digests: list[str]) -> None:
    aliases = Aliases(tmp_path)
    for digest in digests[:2]:
        aliases.register("helper", digest, "r1", "promote", {})
    assert aliases.current("helper", "champion") is None
    aliases.set_alias("helper", "champion", 1, None, run="r1", node="promote")
    aliases.set_alias("helper", "champion", 2, 1, run="r2", node="promote")
    aliases.set_alias("helper", "champion", 2, 2, run="r3", node="promote")
    aliases.set_alias("helper", "challenger", 1, None)
    champion = aliases.current("helper", "champion")
    assert champion is not None
    assert champion.digest == digests[1]
    changes = aliases.history("helper", "champion")
    assert [(change.previous, change.version, change.run, change.node) for change in changes] == [
        (None, 1, "r1", "promote"),
        (1, 2, "r2", "promote"),
    ]
    assert all(change.time.endswith("+00:00") for change in changes)
    assert len(aliases.history("helper")) == 3
    assert aliases.aliases("helper") == {"challenger": 1, "champion": 2}


@pytest.mark.parametrize("expected", [None, 1, 7])
def test_a_lost_compare_and_set_names_the_holder(
    tmp_path: Path, digests: list[str], expected: int | None
) -> None:
    aliases = Aliases(tmp_path)
    for digest in digests:
        aliases.register("helper", digest, "r1", "promote", {})
    aliases.set_alias("helper", "champion", 3, None)
    with pytest.raises(StoreError, match="was changed meanwhile") as caught:
        aliases.set_alias("helper", "champion", 2, expected)
    assert caught.value.found == f"version 3 ({digests[2][:12]}, run r1)"
    assert (caught.value.expected == "not set") is (expected is None)
    champion = aliases.current("helper", "champion")
    assert champion is not None
    assert champion.version == 3
    assert len(aliases.history("helper", "champion")) == 1


def test_only_one_of_many_wins_a_compare_and_set(tmp_path: Path, digests: list[str]) -> None:
    for digest in digests:
        Aliases(tmp_path).register("helper", digest, "r1", "promote", {})
    lost: list[StoreError] = []
    start = threading.Barrier(6)

    def promote(version: int) -> None:
        start.wait(30)
        try:
            Aliases(tmp_path).set_alias("helper", "champion", version, None)
        except StoreError as error:
            lost.append(error)

    threads = [threading.Thread(target=promote, args=(1 + number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(lost) == 5
    assert len(Aliases(tmp_path).history("helper", "champion")) == 1


def test_registrations_at_once_lose_nothing(tmp_path: Path, digests: list[str]) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(
            target=lambda digest=digest: found.append(
                Aliases(tmp_path).register("helper", digest, "r1", "promote", {})
            )
        )
        for digest in digests * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {entry.digest for entry in Aliases(tmp_path).versions("helper")} == set(digests)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "é", "-x", "a" * 129])
def test_names_are_checked(tmp_path: Path, digests: list[str], name: str) -> None:
    aliases = Aliases(tmp_path)
    with pytest.raises(StoreError, match="no name"):
        aliases.register(name, digests[0], "r1", "promote", {})
    aliases.register("helper", digests[0], "r1", "promote", {})
    with pytest.raises(StoreError, match="no alias"):
        aliases.set_alias("helper", name, 1, None)
    with pytest.raises(StoreError, match="no alias"):
        aliases.current("helper", name)


def test_what_is_not_there_cannot_be_registered_or_pointed_at(tmp_path: Path, digests: list[str]) -> None:
    aliases = Aliases(tmp_path)
    with pytest.raises(StoreError, match="not in the store"):
        aliases.register("helper", "0" * 64, "r1", "promote", {})
    with pytest.raises(StoreError, match="no version 1"):
        aliases.set_alias("helper", "champion", 1, None)
    aliases.register("helper", digests[0], "r1", "promote", {})
    with pytest.raises(StoreError, match="no version 2") as caught:
        aliases.set_alias("helper", "champion", 2, None)
    assert caught.value.expected == "one of [1]"


def test_a_full_disk_leaves_the_registry_as_it_was(
    tmp_path: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    aliases = Aliases(tmp_path)
    aliases.register("helper", digests[0], "r1", "promote", {})
    before = (tmp_path / "aliases" / "helper.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="the disk is full"):
        patched.setattr(files_module.os, "fsync", full)
        aliases.register("helper", digests[1], "r1", "promote", {})
    assert (tmp_path / "aliases" / "helper.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "aliases").iterdir()) == [".lock", "helper.json"]
    assert aliases.register("helper", digests[1], "r1", "promote", {}) == 2


def test_a_damaged_registry_is_not_overwritten(tmp_path: Path, digests: list[str]) -> None:
    aliases = Aliases(tmp_path)
    aliases.register("helper", digests[0], "r1", "promote", {})
    path = tmp_path / "aliases" / "helper.json"
    path.write_text(json.dumps({"name": "helper", "versions": "none"}))
    with pytest.raises(StoreError, match="damaged") as caught:
        aliases.register("helper", digests[1], "r1", "promote", {})
    assert caught.value.where == str(path)
    assert json.loads(path.read_text())["versions"] == "none"
