"""Callbacks of a training on two ranks: what they make is what one process makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_work import LastRankAsks, training
from helpers.ranks import in_own_process

pytestmark = pytest.mark.slow

CALLBACKS: list[Any] = [
    {"name": "bema", "every": 2},
    {"name": "divergence", "factor": 1000},
    {"name": "completions", "every": 3, "prompts": ["ab"], "max_new_tokens": 4},
]


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_an_average_is_that_of_one_process(backend: str, tmp_path: Path) -> None:
    options = {"callbacks": CALLBACKS, "eval_steps": 4}
    alone = in_own_process(training, tmp_path / "alone", "single", options)
    found = in_own_process(training, tmp_path / "found", {"name": backend, "ranks": 2}, options)
    assert found["figures"]["eval/loss"] == pytest.approx(alone["figures"]["eval/loss"], rel=1e-4)
    for name, tensor in found["weights"].items():
        assert np.abs(tensor - alone["weights"][name]).max() < 1e-3
    last = in_own_process(training, tmp_path / "last", "single", {"eval_steps": 4})
    assert any(
        np.abs(tensor - last["weights"][name]).max() > 1e-3 for name, tensor in found["weights"].items()
    )


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_all_ranks_end_where_one_asks_for_it(backend: str, tmp_path: Path) -> None:
    options = {"foreign": LastRankAsks, "eval_steps": 4}
    found = in_own_process(training, tmp_path, {"name": backend, "ranks": 2}, options)
    assert found["steps"][-1] == 3 and not found["interrupted"]
    assert found["figures"]["eval/loss"] == found["metrics"][3]["eval/loss"], "of the last weights"
