"""The benchmark's arithmetic, its files, and one race of both sides over a small model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import flops
import materials
import measure
import results
from scenarios import DEFAULT, OBJECTIVES, SCENARIOS, Lengths, Scenario, Shape, trl_grid

TINY = Shape(layers=2, width=16, intermediate=32, heads=2, kv_heads=1, vocabulary=32)
SCENARIO = Scenario("tiny", TINY, Lengths(5, 0.3, 3, 8), Lengths(4, 0.3, 2, 6), {"sft": 4, "dpo": 4})


def test_work_counts_a_shared_prompt_once() -> None:
    row = {"prompt": "a b", "chosen": " c", "rejected": " d e"}
    # Prompt 2, answers 2 and 3 with their end tokens. Attended: 3 in the prompt, 2·2 + 3 and 3·2 + 6 after it.
    assert flops.work_of(row, "dpo") == flops.Work(tokens=7, rows=9, attended=3 + 7 + 12, supervised=5)


def test_forward_counts_body_attention_and_head() -> None:
    work = flops.Work(tokens=3, rows=3, attended=6, supervised=1)
    body = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32)
    assert TINY.body == body
    assert flops.forward(TINY, work) == 2 * body * 3 + 4 * 6 * 16 * 2 + 2 * 32 * 16


def test_adapters_spare_the_gradients_of_frozen_matrices() -> None:
    work = flops.Work(tokens=3, rows=3, attended=0, supervised=1)
    once = flops.forward(TINY, work)
    assert flops.necessary(TINY, work, "sft", lora=False) == 3 * once
    assert flops.necessary(TINY, work, "sft", lora=True) == 2 * once
    assert flops.necessary(TINY, work, "dpo", lora=False) == 4 * once


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_side_sees_the_lengths_that_are_counted(tmp_path: Path, objective: str) -> None:
    directory = materials.model_directory(TINY, tmp_path)
    drawn = materials.rows(SCENARIO, objective, 6)
    assert drawn == materials.rows(SCENARIO, objective, 8)[:6]
    for row, tokens in zip(drawn, materials.encoded(directory, objective, drawn), strict=True):
        work = flops.work_of(row, objective)
        if objective == "sft":
            assert len(tokens["input_ids"]) == work.tokens
            assert sum(label != -100 for label in tokens["labels"]) == work.supervised
        else:
            assert len(tokens["chosen_ids"]) + len(tokens["rejected_ids"]) == work.supervised
            assert len(tokens["prompt_ids"]) == work.tokens - work.supervised


def test_a_step_costs_its_share_of_the_reference() -> None:
    seconds = {"step": [9.0] * results.WARM + [1.0, 3.0, 2.0], "reference": [4.0, 8.0, 6.0]}
    assert results.step_seconds(seconds, epochs=1, steps=3) == 2.0 + 2.0
    assert results.step_seconds({"step": [9.0, 9.0, 3.0, 2.0]}, epochs=2, steps=2) == 2.5
    assert results.tried_seconds({"step": [9.0, 9.0, 3.0, 2.0, 1.0, 4.0]}, False, 3, 2) == 1.5
    assert results.tried_seconds({"step": [9.0, 9.0, 3.0, 2.0, 1.0, 5.0]}, True, 3, 2) == 2.5


def test_a_torn_line_is_no_measurement(tmp_path: Path) -> None:
    kept = results.Results(tmp_path / "results.jsonl")
    kept.keep(("grid", "a"), seconds=1.0)
    with kept.path.open("a") as lines:
        lines.write('{"key": ["grid", "b"], "sec')
    again = results.Results(kept.path)
    assert again.has(("grid", "a"), ours=True)
    assert not again.has(("grid", "b"), ours=False)
    again.code = "another"
    assert again.has(("grid", "a"), ours=False)
    assert not again.has(("grid", "a"), ours=True)


def test_every_setting_makes_steps_of_the_batch() -> None:
    for scenario in SCENARIOS.values():
        for objective, batch in scenario.batch.items():
            grid = trl_grid(objective, batch)
            assert grid[DEFAULT]["gradient_checkpointing"]
            for setting in grid.values():
                made = setting["per_device_train_batch_size"] * setting["gradient_accumulation_steps"]
                assert made == batch or setting.get("packing")


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_both_sides_compute_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, lora: bool
) -> None:
    names = [DEFAULT]
    few = {name: trl_grid(objective, 4)[name] for name in names}
    monkeypatch.setattr(measure, "trl_grid", lambda *_: few)
    kept = results.Results(tmp_path / "results.jsonl")
    for name in names:
        kept.keep(("grid", "tiny", objective, name), seconds=1.0)
    scenario = replace(SCENARIO, lora=lora)
    measure.Bench(kept, [], repeats=1).race(scenario, objective)
    race = kept.found["race", "tiny", objective]
    assert max(race["gradients"].values()) < 1e-5
    assert all(
        len(race["sides"][name]["seconds"]["step"]) == 1 + results.WARM for name in ("posttrain", *names)
    )
