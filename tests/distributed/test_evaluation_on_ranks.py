"""Evaluations count every row once on two ranks, and ranks skip the same steps in float16."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.rank_evaluation import evaluated, in_float16
from helpers.ranks import in_own_process
from helpers.training import model_artifact

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_every_row_counts_once_whatever_the_size_of_the_set(tmp_path: Path, backend: str):
    found = in_own_process(evaluated, tmp_path, {"name": backend}, range(1, 10))
    assert list(found) == list(range(1, 10))
    for alone, together in found.values():
        assert together == pytest.approx(alone, rel=1e-6)
    losses = [alone["loss"] for alone, _ in found.values()]
    assert len(set(losses)) == len(losses)


def test_ranks_skip_the_same_steps_in_float16(tmp_path: Path):
    model = model_artifact(tmp_path / "model", hidden_size=64, intermediate_size=128)
    figures, skipped = in_own_process(in_float16, tmp_path / "single", model, "single")
    assert 0 < skipped[-1] < 8
    for name in ("ddp", "fsdp2"):
        found = in_own_process(in_float16, tmp_path / name, model, {"name": name, "ranks": 2})
        assert found[1] == skipped
        assert found[0] == pytest.approx(figures, rel=1e-3)
