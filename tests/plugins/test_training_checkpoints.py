from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import StoreError
from posttrain_plugins.backends.single import Single
from posttrain_plugins.training.checkpoints import (
    Checkpoints,
    damage,
    load_state,
    load_weights,
    save_state,
    save_weights,
    write_directory,
)
from posttrain_plugins.training.randomness import random_state, restore_random_state


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, notes: list[str]) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, notes.append)


def fill(directory: Path) -> None:
    (directory / "a.bytes").write_bytes(b"abc")
    (directory / "b.json").write_text("{}")


def test_the_newest_is_taken_and_the_oldest_are_pruned(checkpoints: Checkpoints, notes: list[str]):
    for step in (2, 4, 10):
        checkpoints.write(step, fill)
    assert checkpoints.newest().step == 10
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["step-00000004", "step-00000010"]
    assert notes == []


def test_without_any_there_is_none(checkpoints: Checkpoints):
    assert checkpoints.newest() is None


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: (path / "a.bytes").write_bytes(b"abX"), "a.bytes: expected sha256"),
        (lambda path: (path / "a.bytes").write_bytes(b"ab"), "a.bytes: expected 3 bytes, found 2"),
        (lambda path: (path / "b.json").unlink(), "b.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is not readable"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not readable"),
    ],
)
def test_a_damaged_newest_is_skipped_and_said(checkpoints: Checkpoints, notes: list[str], harm, told: str):
    for step in (2, 4):
        checkpoints.write(step, fill)
    harm(checkpoints.directory / "step-00000004")
    assert checkpoints.newest().step == 2
    assert len(notes) == 1 and notes[0].startswith("checkpoint step-00000004 is skipped") and told in notes[0]


def test_a_save_that_was_cut_off_is_never_seen(checkpoints: Checkpoints, notes: list[str]):
    checkpoints.write(2, fill)

    def cut_off(directory: Path) -> None:
        fill(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(4, cut_off)
    assert checkpoints.newest().step == 2
    assert notes == []
    checkpoints.write(4, fill)
    assert checkpoints.newest().step == 4


def test_pruning_never_removes_the_one_just_written(tmp_path: Path, notes: list[str]):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    for step in (2, 9):
        checkpoints.write(step, fill)
    (checkpoints.directory / "step-00000009" / "a.bytes").write_bytes(b"abX")
    assert checkpoints.newest() is None
    checkpoints.write(3, fill)
    assert checkpoints.newest().step == 3


def test_a_damaged_directory_is_replaced(tmp_path: Path):
    target = tmp_path / "reference"
    write_directory(target, fill)
    (target / "a.bytes").unlink()
    write_directory(target, fill)
    assert damage(target) is None


def test_a_kill_while_a_checkpoint_is_replaced_leaves_one(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    checkpoints.write(4, fill)
    remove = shutil.rmtree

    def killed(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(4, fill)
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 4


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_two_names_leaves_one_that_later_writes_do_not_lose(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch, renames: int
):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, notes.append)
    checkpoints.write(4, fill)
    for _ in range(2):
        _kill_at_rename(renames, lambda: checkpoints.write(4, fill), monkeypatch)
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 4 and notes == []
    checkpoints.write(4, fill)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-00000004"]
    _kill_at_rename(renames, lambda: checkpoints.write(4, fill), monkeypatch)
    checkpoints.write(5, fill)
    assert [path.name for path in checkpoints.directory.glob("*step-*[0-9]")] == ["step-00000005"]
    assert not list(checkpoints.directory.glob("*.old"))


def _kill_at_rename(number: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do some work, and be killed before the rename of that number, if there are so many."""
    plain, begun = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        begun.append(self)
        if len(begun) == number:
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        work()


def test_state_survives_with_its_types(tmp_path: Path):
    state = {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3).bfloat16()}}},
        "groups": [{"lr": 1e-3 / 3, "betas": (0.9, 0.999), "flag": None, "on": True}],
    }
    save_state(tmp_path, state)
    found = load_state(tmp_path)
    assert found["groups"] == state["groups"]
    for name, tensor in state["optimizer"]["state"][0].items():
        assert torch.equal(found["optimizer"]["state"][0][name], tensor)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_state_refuses_what_it_cannot_hold(tmp_path: Path):
    with pytest.raises(TypeError, match="cannot hold a object"):
        save_state(tmp_path, {"x": object()})


def test_random_generators_go_on_where_they_were(tmp_path: Path):
    save_state(tmp_path, random_state())
    expected = random.random(), np.random.rand(), torch.rand(3).tolist()
    restore_random_state(load_state(tmp_path))
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == expected


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    save_state(tmp_path, {"x": torch.ones(1)})
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(StoreError, match="cannot be read"):
        load_state(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(StoreError):
        load_weights(tmp_path / "w.safetensors", torch.nn.Linear(1, 1))
    assert not (tmp_path / "exploded").exists()


def test_weights_hold_what_training_changes(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    path = tmp_path / "w.safetensors"
    save_weights(path, Single().weights(model, trainable=True))
    assert "0.weight" in load_file(path) and "1.running_mean" in load_file(path)
    assert "0.bias" not in load_file(path) and "2.weight" not in load_file(path)
    before = model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.zero_()
    load_weights(path, model)
    assert torch.equal(model[0].weight, before) and model[2].weight is model[0].weight


def test_weights_may_be_any_mapping(tmp_path: Path):
    """A tensor with two names stands under the first of them."""
    one, two = torch.ones(2), torch.zeros(1)
    save_weights(tmp_path / "w.safetensors", MappingProxyType({"b": one, "a": one, "c": two}))
    assert load_file(tmp_path / "w.safetensors").keys() == {"b", "c"}


def test_weights_of_another_model_are_refused(tmp_path: Path):
    save_weights(tmp_path / "w.safetensors", Single().weights(torch.nn.Linear(2, 2)))
    for other in (torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False)):
        with pytest.raises(StoreError, match="does not fit"):
            load_weights(tmp_path / "w.safetensors", other)
