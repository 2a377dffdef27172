"""Ranks start and end together, and a rank that fails ends the training with its own reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_work import computed_already, failing, hanging, orphaned, shares, turns
from helpers.ranks import in_own_process

from posttrain.errors import StageError
from posttrain_plugins.launchers.local import Share, _tried
from posttrain_plugins.training.offline import OfflineTrainer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("the local launcher")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    directory = tmp_path_factory.mktemp("shares")
    return directory, in_own_process(shares, directory)


def test_every_rank_takes_its_part_of_the_threads(shared: tuple[Path, list[list[Any]]]):
    assert [[rank, threads] for rank, threads, *_ in shared[1]] == [[0, 1], [1, 1]]


def test_ranks_draw_different_numbers_after_they_parted(shared: tuple[Path, list[list[Any]]]):
    """Dropout masks of two ranks are not the same; rank 0 draws what one process would."""
    import torch

    drawn = [each[2] for each in shared[1]]
    assert drawn[0] == float(torch.rand((), generator=torch.Generator().manual_seed(5)))
    assert drawn[1] != drawn[0]


def test_libraries_find_nothing_that_would_tell_them_of_ranks(shared: tuple[Path, list[list[Any]]]):
    assert [each[3] for each in shared[1]] == [[], []]


def test_what_rank_0_knows_all_ranks_know(shared: tuple[Path, list[list[Any]]]):
    assert [each[4] for each in shared[1]] == [{"from": 0, "text": "ß", "none": None}] * 2


def test_nothing_is_left_of_the_other_ranks(shared: tuple[Path, list[list[Any]]]):
    directory = shared[0]
    assert not (directory / "work/ranks").exists()
    assert [path.name for path in (directory / "out-model").iterdir()] == ["mine"]


def test_an_exception_on_another_rank_is_the_error_of_the_training(tmp_path: Path):
    with pytest.raises(StageError, match="what went wrong") as caught:
        in_own_process(failing, tmp_path, "raise")
    assert caught.value.where == "rank 1 of 2"
    assert "ZeroDivisionError" in caught.value.message


def test_a_refusal_on_another_rank_keeps_its_parts(tmp_path: Path):
    with pytest.raises(StageError, match="memory ran out") as caught:
        in_own_process(failing, tmp_path, "refuse")
    assert (caught.value.where, caught.value.fix) == ("rank 1 of 2, step 4", "take less")


def test_a_killed_rank_ends_the_training_at_once(tmp_path: Path):
    before = time.monotonic()
    with pytest.raises(StageError, match="a rank of the training ended") as caught:
        in_own_process(failing, tmp_path, "killed", seconds=60)
    assert caught.value.where == "rank 1 of 2"
    assert "SIGKILL" in str(caught.value.found)
    assert time.monotonic() - before < 60, "gloo itself would wait for half an hour"


def test_what_rank_0_refuses_is_its_own_error(tmp_path: Path):
    with pytest.raises(StageError, match="rank 0 knows why"):
        in_own_process(failing, tmp_path, "leader")


def test_rank_0_is_ended_when_it_hangs_after_another_rank_has_failed(tmp_path: Path):
    with pytest.raises(EOFError):
        in_own_process(hanging, tmp_path, seconds=60)
    told = (tmp_path / "told").read_text()
    assert "rank 1 of 2: a rank of the training failed: ZeroDivisionError: what went wrong" in told
    assert told.endswith("rank 0 hangs, and is ended\n")


def test_ranks_that_split_the_weights_open_the_whole_model_in_turns(tmp_path: Path):
    told = in_own_process(turns, tmp_path, "fsdp2")
    assert told == [f"{rank} {what}" for rank in range(3) for what in ("opens on cpu", "has prepared")]


def test_no_rank_outlives_rank_0(tmp_path: Path):
    notes = [tmp_path / "work" / f"pid-{rank}" for rank in range(2)]
    # Rank 0 is killed with SIGKILL then.
    in_own_process(orphaned, tmp_path, enough=lambda: all(note.exists() for note in notes))
    other = int(notes[1].read_text())
    for _ in range(100):
        if not _lives(other):
            return
        time.sleep(0.1)
    os.kill(other, signal.SIGKILL)
    raise AssertionError("rank 1 still runs")


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_process_that_has_computed_starts_no_ranks(tmp_path: Path):
    with pytest.raises(StageError, match="has computed already") as caught:
        in_own_process(computed_already, tmp_path)
    assert caught.value.fix is not None and "single" in caught.value.fix


def test_a_process_that_has_looked_for_gpus_starts_no_ranks_on_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    assert not _tried(Share(1, "0"))


_LOOK = """
import sys, torch
looked = []
torch.cuda.is_available = lambda: bool(looked.append(1))
import {module}
assert "transformers" not in sys.modules, "some of what it imports looks for GPUs"
import posttrain_plugins.training.checkpoints
assert not looked
"""


def test_nothing_looks_for_gpus_before_ranks_are_forked():
    """A fork could not use any then."""
    module = OfflineTrainer.target.partition(":")[0]
    subprocess.run([sys.executable, "-c", _LOOK.format(module=module)], check=True)
