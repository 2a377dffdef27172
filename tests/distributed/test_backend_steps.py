"""One optimizer step on two ranks is the step of one process, whatever the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.rank_cases import BACKENDS, CASES
from helpers.rank_work import compare_steps, held, sometimes, unused
from helpers.ranks import in_own_process
from helpers.stepping import BOUND

from posttrain.errors import StageError

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(f"steps on {name}")) for name in BACKENDS],
)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    found: dict[str, Any] = in_own_process(compare_steps, directory, BACKENDS[request.param], CASES)
    return found


def test_weights_after_a_step_are_those_of_one_process(compared: dict[str, Any]):
    """No element differs by more than `BOUND` of the largest update and one unit in the last place."""
    assert compared.keys() == CASES.keys()
    assert {name: case["apart"] for name, case in compared.items() if not case["apart"] <= BOUND} == {}
    assert all(case["names"] and case["update"] > 1e-4 for case in compared.values())


def test_loss_metrics_and_gradient_norm_are_those_of_one_process(compared: dict[str, Any]):
    for case in compared.values():
        alone, together = case["alone"], case["together"]
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert together["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)


def test_ranks_have_several_micro_batches_and_some_have_nothing(compared: dict[str, Any]):
    """The cases are what their names say."""
    assert len(compared["token_mean"]["together"]["rank 0"]) > 1
    assert compared["a rank without sequences"]["together"]["rank 0"] in ([0], [1])
    assert len(compared["one micro-batch each"]["together"]["rank 0"]) == 1


def test_parameters_that_take_no_part_are_named_or_looked_for(tmp_path: Path):
    with pytest.raises(StageError, match="take no part") as caught:
        in_own_process(unused, tmp_path / "one", {"name": "ddp"})
    assert caught.value.found == "idle.weight, idle.bias"
    searching = {"name": "ddp", "find_unused_parameters": True}
    assert in_own_process(unused, tmp_path / "two", searching) < 1e-6


def test_a_parameter_that_the_last_micro_batch_leaves_out_is_told_before_the_update(tmp_path: Path):
    """It has a gradient of its own then, which was never averaged."""
    with pytest.raises(StageError, match="take no part") as caught:
        in_own_process(sometimes, tmp_path / "one", {"name": "ddp"})
    assert caught.value.found == "parameters that only some micro-batches use"
    searching = {"name": "ddp", "find_unused_parameters": True}
    # Ranks' inputs are 1 and 2. The mean over ranks of sums: (2 + 4) / 2, and (1 + 4) / 2.
    assert in_own_process(sometimes, tmp_path / "two", searching) == [3.0, 2.5]


@pytest.mark.parametrize(
    ("backend", "weights", "moments"),
    [("ddp", 1, 1), ("fsdp2", 2, 2), ("zero-1", 1, 2), ("zero-2", 1, 2), ("zero-3", 2, 2)],
)
def test_what_is_split_is_held_once(backend: str, weights: int, moments: int, tmp_path: Path):
    found = in_own_process(held, tmp_path, BACKENDS[backend])
    padding = 0.02 * found["total"]
    assert found["weights"] == pytest.approx(found["total"] / weights, abs=padding)
    assert found["moments"] == pytest.approx(found["total"] / moments, abs=padding)
    assert found["kinds"] == (["DTensor"] if backend == "fsdp2" else ["Tensor"])
