"""The benchmark's arithmetic, its files, and one race of both sides over a small model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.contexts import catalogue, configured

sys.path.insert(0, str(Path(__file__).parent))

import comparison
import flops
import materials
import measure
import pages
import profile_side
import report
import results
from objectives import OBJECTIVES, OTHER
from scenarios import DEFAULT, SCENARIOS, Lengths, Scenario, Shape, trl_grid

TINY = Shape(layers=2, width=16, intermediate=32, heads=2, kv_heads=1, vocabulary=32)
SCENARIO = Scenario("tiny", TINY, Lengths(5, 0.3, 3, 8), Lengths(4, 0.3, 2, 6), dict.fromkeys(OBJECTIVES, 4))


def test_work_counts_a_shared_prompt_once() -> None:
    row = {"prompt": "a b", "chosen": " c", "rejected": " d e"}
    # Prompt 2, answers 2 and 3 with their end tokens. Attended: 3 in the prompt, 2·2 + 3 and 3·2 + 6 after it.
    assert flops.work_of(row, ("chosen", "rejected")) == flops.Work(
        tokens=7, rows=9, attended=3 + 7 + 12, supervised=5
    )


def test_forward_counts_body_attention_and_head() -> None:
    work = flops.Work(tokens=3, rows=3, attended=6, supervised=1)
    body = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32)
    assert TINY.body == body
    assert flops.forward(TINY, work) == 2 * body * 3 + 4 * 6 * 16 * 2 + 2 * 32 * 16


def test_adapters_spare_the_gradients_of_frozen_matrices() -> None:
    row = {"prompt": "a", "completion": " b", "chosen": " b", "rejected": " c"}

    def needed(objective: str, lora: bool) -> float:
        return flops.necessary(TINY, [row], OBJECTIVES[objective], lora)

    once = {
        name: flops.forward(TINY, flops.work_of(row, OBJECTIVES[name].learned)) for name in ("sft", "dpo")
    }
    attention = 4 * flops.work_of(row, ("completion",)).attended * 16 * 2
    assert needed("sft", lora=False) == 3 * once["sft"]
    assert needed("sft", lora=True) == 2 * once["sft"] + attention
    assert needed("dpo", lora=False) == 4 * once["dpo"]
    assert needed("orpo", lora=False) == needed("cpo", lora=False) == 3 * once["dpo"]


def test_other_rows_answers_need_no_gradient_and_rewards_no_vocabulary() -> None:
    row = {"prompt": "a", "completion": " b", OTHER: " c", "chosen": " b", "rejected": " c"}
    own, both = (flops.work_of(row, columns) for columns in (("completion",), ("completion", OTHER)))
    kto = flops.necessary(TINY, [row], OBJECTIVES["kto"], lora=False)
    assert kto == 2 * flops.forward(TINY, own) + 2 * flops.forward(TINY, both)
    head = 2 * 32 * 16 * both.supervised
    reward = flops.necessary(TINY, [row], OBJECTIVES["reward"], lora=False)
    assert reward == 3 * (flops.forward(TINY, both) - head)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_side_sees_the_lengths_that_are_counted(tmp_path: Path, objective: str) -> None:
    directory, known = materials.model_directory(TINY, tmp_path), OBJECTIVES[objective]
    drawn = materials.rows(SCENARIO, objective, 6)
    assert drawn == materials.rows(SCENARIO, objective, 8)[:6]
    counted = materials.paired(drawn, objective)
    for row, tokens in zip(counted, materials.encoded(directory, objective, drawn), strict=True):
        work = flops.work_of(row, (*known.learned, *known.measured))
        assert _sizes(tokens) == (work.rows, work.supervised)


def _sizes(given: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens the sequences have TRL is given, and how many of them are answers'."""
    ids = {name: value for name, value in given.items() if name.endswith("ids") and "prompt" not in name}
    labels = [value for name, value in given.items() if name.endswith("labels")]
    prompt = len(given.get("prompt_ids", ()))
    sizes = [len(value) for value in ids.values()]
    if labels:
        return sum(sizes), sum(label != -100 for value in labels for label in value)
    if prompt:
        return sum(sizes) + prompt * len(sizes), sum(sizes)
    shared = next(at for at, (one, other) in enumerate(zip(*ids.values(), strict=False)) if one != other)
    return sum(sizes), sum(sizes) - shared * len(sizes)


def test_pairs_are_those_that_posttrain_draws(tmp_path: Path) -> None:
    drawn = materials.rows(SCENARIO, "kto", 6)
    assert {type(row["label"]) for row in drawn} == {bool}
    others = [row[OTHER] for row in materials.paired(drawn, "kto")]
    assert sorted(others) == sorted(row["completion"] for row in drawn)
    assert all(other != row["completion"] for other, row in zip(others, drawn, strict=True))
    stage = catalogue().stage("train.kto")
    assert configured(stage).seed == materials.SEED, "the sides would be given other pairs"


def test_a_step_costs_its_share_of_the_reference() -> None:
    seconds = {"step": [9.0] * results.WARM + [1.0, 3.0, 2.0], "reference": [4.0, 8.0, 6.0]}
    assert results.step_seconds(seconds, epochs=1, steps=3) == 2.0 + 2.0
    assert results.step_seconds({"step": [9.0, 9.0, 1.0]}, epochs=1, steps=3, warm=1) == 5.0
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
            assert len(grid) > 3
            for setting in grid.values():
                made = setting["per_device_train_batch_size"] * setting["gradient_accumulation_steps"]
                assert made == batch or setting.get("packing")


def test_the_gradient_is_compared_where_trl_computes_the_same_loss() -> None:
    found = {("race", "short-answers", objective): _race("1x8") for objective in ("orpo", "reward")}
    rows = {row.objective: row for row in comparison.table(found, pages.OFFLINE)}
    assert (rows["orpo"].compared, rows["orpo"].gradient) == (DEFAULT, 1e-6)
    assert (rows["reward"].compared, rows["reward"].gradient) == ("1x8", 0.5)
    assert rows["orpo"].shortfalls == ["3.00× of at least 5×"]
    assert rows["reward"].shortfalls == ["gradients differ by 5.0e-01"]
    told = "\n".join(report.lines_of(pages.OFFLINE, found))
    assert "| short-answers | ORPO |" in told
    assert "Not measured: short-answers KTO, short-answers CPO, long-answers KTO," in told
    assert comparison.table(found, pages.SPEED) == []
    assert "other work" not in told


def test_a_race_beside_other_work_is_told_from_those_of_other_pages() -> None:
    found = {
        ("race", "short-answers", "reward"): _race("1x8"),
        ("race", "short-answers", "sft"): _race("1x8"),
    }
    found["race", "short-answers", "sft"]["sides"]["machine"]["seconds"]["product"] = [0.1]
    (line,) = (line for line in report.lines_of(pages.OFFLINE, found) if "other work" in line)
    assert "short-answers reward" in line


def test_a_race_is_between_the_settings_that_are_asked_for(tmp_path: Path) -> None:
    kept = results.Results(tmp_path / "results.jsonl")
    for name, seconds in (("4x1", 1.0), ("1x4", 2.0), ("2x2", 3.0)):
        kept.keep(("grid", "tiny", "cpo", name), seconds=seconds)
    assert measure.Bench(kept, [], 1)._fastest(SCENARIO, "cpo") == ["4x1", "1x4", "2x2"]
    assert measure.Bench(kept, [], 1, ["2x2", "1x4"])._fastest(SCENARIO, "cpo") == ["1x4", "2x2"]


def _race(best: str) -> dict[str, Any]:
    setup = {"setup": 1.0}
    machine = {"operations": 1.0, "seconds": {"product": [1.0], "quick product": [1.0]}}
    return {
        "commit": "0123456789ab",
        "seconds": {"posttrain": 1.0, best: 3.0, DEFAULT: 9.0},
        "best": best,
        "gradients": {best: 0.5, DEFAULT: 1e-6},
        "steps": 1,
        "sides": {"machine": machine, "posttrain": setup, best: setup, DEFAULT: setup},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "lora"), [*((name, False) for name in OBJECTIVES), ("sft", True), ("dpo", True)]
)
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


@pytest.mark.slow
def test_a_profile_adds_up(tmp_path: Path) -> None:
    kept = results.Results(tmp_path / "results.jsonl")
    measure.Bench(kept, [], repeats=1).profile(SCENARIO, "dpo")
    profile = kept.found["profile", "tiny", "dpo"]
    held = profile["memory"]
    assert held["weights"] == 4 * TINY.parameters
    # Two pairs of answers at least, with logits for each of their tokens.
    assert held["kept"] >= 4 * TINY.vocabulary * 4
    assert held["resident"] == sum(size for part, size in held.items() if part != "resident") > 2**20
    assert min(held[part] for part in ("moments", "gradients", "backward")) >= 0
    assert min(profile["time"].values()) > 0


def test_the_time_of_operations_goes_to_what_they_are_part_of() -> None:
    def event(key: str, milliseconds: float, *shape: int) -> SimpleNamespace:
        return SimpleNamespace(
            key=key, self_cpu_time_total=milliseconds * 1e3, input_shapes=[list(shape), []]
        )

    events = [
        event("aten::mm", 100, 12, 32),
        event("aten::mm", 200, 12, 16),
        event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 50, 1, 2),
        event("aten::_fused_adamw_", 150),
        event("aten::mul", 10, 12, 32),
    ]
    assert profile_side.shares(events, 1.0, vocabulary=32) == pytest.approx(
        {
            "products of the head": 0.1,
            "other products": 0.2,
            "attention": 0.05,
            "optimizer": 0.15,
            "the rest": 0.5,
        }
    )


def test_a_page_shows_the_profiles_of_its_objectives() -> None:
    held = dict.fromkeys(("weights", "moments", "gradients", "kept", "backward", "other", "spare"), 2**20)
    spent = dict.fromkeys(
        ("products of the head", "other products", "attention", "optimizer", "the rest"), 0.2
    )
    record = {"commit": "0123456789ab", "memory": {**held, "resident": 7 * 2**20}, "time": spent}
    profile = {("profile", "short-answers", "dpo"): record}
    told = "\n".join(report.lines_of(pages.SPEED, profile))
    assert "| short-answers | DPO | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 7 | 4 |  | `0123456` |" in told
    assert "| short-answers | DPO | 20% | 20% | 20% | 20% | 20% | `0123456` |" in told
    assert "## Profiles" not in "\n".join(report.lines_of(pages.OFFLINE, {}))
