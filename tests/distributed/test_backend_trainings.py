"""Whole trainings on two ranks: what they save, how they resume, and what a change of backend does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_cases import TRAINED_ON
from helpers.rank_work import TRAINING, short_of_memory, training
from helpers.ranks import in_own_process

from posttrain.errors import StageError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainings on ranks")]

SEVERAL = [name for name in TRAINED_ON if name != "single"]
DROPOUT = {"dropout": 0.2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trainings from start to end, one of each kind."""
    done: dict[str, dict[str, Any]] = {}

    def of(backend: str, **options: Any) -> dict[str, Any]:
        key = json.dumps([backend, options])
        if key not in done:
            directory = tmp_path_factory.mktemp(backend)
            done[key] = in_own_process(training, directory, TRAINED_ON[backend], options)
        return done[key]

    return of


@pytest.mark.parametrize("backend", SEVERAL)
def test_what_is_saved_is_one_ordinary_model(backend: str, undisturbed: Any):
    """Names, shapes and configuration of a single process's; values differ by the rounding of seven steps."""
    alone, found = undisturbed("single"), undisturbed(backend)
    assert found["files"] == alone["files"]
    assert found["config"] == alone["config"]
    assert {n: w.shape for n, w in found["weights"].items()} == {
        n: w.shape for n, w in alone["weights"].items()
    }
    for name, tensor in found["weights"].items():
        assert np.abs(tensor - alone["weights"][name]).max() < 1e-3
    losses = [[step["loss"] for step in each["metrics"].values()] for each in (alone, found)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero-3"])
def test_precision_memory_and_budget_go_with_every_backend(backend: str, undisturbed: Any):
    options = {"bf16": True, "gradient_checkpointing": True, "micro_batch_tokens": "auto"}
    alone, found = undisturbed("single", **options), undisturbed(backend, **options)
    losses = [[step["loss"] for step in each["metrics"].values()] for each in (alone, found)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0] != pytest.approx(
        [step["loss"] for step in undisturbed("single")["metrics"].values()], rel=1e-7
    ), "bfloat16 was used"


@pytest.mark.parametrize("backend", SEVERAL)
def test_a_reward_model_comes_out_of_every_backend(backend: str, undisturbed: Any):
    """It is opened again and judged by rank 0 alone."""
    options = {"uses": "train.reward", "eval_steps": 7}
    alone, found = undisturbed("single", **options), undisturbed(backend, **options)
    assert found["files"] == alone["files"] and "values.json" in found["files"]
    for name, tensor in found["weights"].items():
        assert np.abs(tensor - alone["weights"][name]).max() < 1e-3
    for name in ("eval/loss", "eval/accuracy", "eval/rewards/mean"):
        assert found["figures"][name] == pytest.approx(alone["figures"][name], rel=1e-3, abs=1e-5)
    assert any("judgements of held-out rows" in note for note in found["notes"])


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero-3"])
def test_an_adapter_is_saved_whole(backend: str, undisturbed: Any):
    alone, found = undisturbed("single", lora={"r": 2}), undisturbed(backend, lora={"r": 2})
    assert found["files"] == alone["files"]
    assert {n: w.shape for n, w in found["weights"].items()} == {
        n: w.shape for n, w in alone["weights"].items()
    }
    assert all(tensor.ndim == 2 and tensor.size for tensor in found["weights"].values())
    for name, tensor in found["weights"].items():
        assert np.abs(tensor - alone["weights"][name]).max() < 1e-3


@pytest.mark.parametrize("backend", SEVERAL)
def test_the_learning_rate_depends_on_the_step_alone(backend: str, undisturbed: Any):
    rates = [step["learning_rate"] for step in undisturbed("single")["metrics"].values()]
    assert [step["learning_rate"] for step in undisturbed(backend)["metrics"].values()] == rates
    assert len(rates) == TRAINING["max_steps"]


@pytest.mark.parametrize(
    ("backend", "stop", "options"),
    [
        ("ddp", 2, DROPOUT),
        ("ddp", 5, DROPOUT),
        ("ddp", 5, {"uses": "train.dpo"}),
        ("fsdp2", 2, DROPOUT),
        ("fsdp2", 5, {}),
        # asked to stop while the ranks evaluate
        ("ddp", 4, {"eval_steps": 2, "load_best_model_at_end": True}),
        ("fsdp2", 4, {"eval_steps": 4}),
        ("zero-2", 5, {}),
        ("zero-3", 5, {}),
    ],
)
def test_a_stopped_training_goes_on_to_the_same_weights(
    backend: str, stop: int, options: dict[str, Any], undisturbed: Any, tmp_path: Path
):
    """Bit by bit, in epoch 0 and later, with shuffled rows and, where there is dropout, each rank's own masks."""
    expected = undisturbed(backend, **options)
    first = in_own_process(training, tmp_path, TRAINED_ON[backend], {**options, "stop_at": stop})
    assert first["interrupted"] and first["steps"][-1] == stop
    second = in_own_process(training, tmp_path, TRAINED_ON[backend], options)
    assert second["steps"][0] == stop + 1
    assert {**first["metrics"], **second["metrics"]}.keys() == expected["metrics"].keys()
    for name, tensor in second["weights"].items():
        assert np.array_equal(tensor, expected["weights"][name]), name


def test_an_optimizer_state_in_one_piece_serves_any_number_of_ranks(undisturbed: Any, tmp_path: Path):
    in_own_process(training, tmp_path, TRAINED_ON["ddp"], {"stop_at": 4})
    found = in_own_process(training, tmp_path, TRAINED_ON["single"], {})
    assert found["steps"] == [5, 6, 7]
    for name, tensor in undisturbed("single")["weights"].items():
        assert np.abs(tensor - found["weights"][name]).max() < 1e-3


def test_a_split_optimizer_state_is_not_taken_for_another(tmp_path: Path):
    in_own_process(training, tmp_path, TRAINED_ON["fsdp2"], {"stop_at": 2})
    with pytest.raises(StageError, match="another backend") as caught:
        in_own_process(training, tmp_path, TRAINED_ON["ddp"], {})
    assert caught.value.found == "optimizer state split by fsdp2 over 2 ranks"
    assert caught.value.expected == "optimizer state in one piece"


@pytest.mark.parametrize("backend", ["ddp", "zero-3"])
def test_when_one_rank_runs_out_of_memory_all_stop_and_go_on_with_half(
    backend: str, undisturbed: Any, tmp_path: Path
):
    options = {"micro_batch_tokens": 64, "layout": "padded"}
    with pytest.raises(StageError, match="memory ran out") as caught:
        in_own_process(short_of_memory, tmp_path, TRAINED_ON[backend], 5, options)
    assert caught.value.where == "rank 1 of 2, a step of 4 examples"
    arranged = tmp_path / "work/arrangement.json"
    half = json.loads(arranged.read_text())["tokens"]
    assert 0 < half <= 32
    found = in_own_process(training, tmp_path, TRAINED_ON[backend], options)
    assert found["steps"][0] == 4, "the last checkpoint is of step 3"
    assert json.loads(arranged.read_text())["tokens"] == half
    for name, tensor in undisturbed("single")["weights"].items():
        assert np.abs(tensor - found["weights"][name]).max() < 1e-3


@pytest.mark.parametrize("backend", SEVERAL)
def test_the_best_weights_are_put_out(backend: str, tmp_path: Path):
    """Weights are loaded once more after the last step, when wrappers, shards and engines are in use."""
    options = {"eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1.0}
    found = in_own_process(training, tmp_path, TRAINED_ON[backend], options)
    assert found["figures"]["best_step"] < TRAINING["max_steps"]
    for name, tensor in found["best"].items():
        assert np.array_equal(found["weights"][name], tensor), name
