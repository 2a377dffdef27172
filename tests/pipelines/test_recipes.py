"""What is said about the shipped recipes: a section with their numbers, and an experiment that seeds whatever draws."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.planning.source import load
from posttrain_pipelines.registration import posttrain_recipes

ROOT = Path(__file__).resolve().parents[2]
FILES = {recipe.name: Path(recipe.target) for recipe in posttrain_recipes()}
README = next(iter(FILES.values())).with_name("README.md").read_text(encoding="utf-8")
MEASURED = sorted(set(FILES) - {"smollm"})


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "evidence")
    return importlib.import_module("learning").EXPERIMENTS


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_has_a_section_with_its_command(name: str) -> None:
    _, found, section = README.partition(f"## `{name}`\n")
    assert found and f"posttrain run {name}\n" in section.partition("\n## ")[0]


@pytest.mark.parametrize("name", FILES)
def test_an_experiment_seeds_every_stage_of_its_recipe_that_draws(
    name: str, experiments: dict[str, Any]
) -> None:
    stages = load(FILES[name]).data["stages"]
    experiment = experiments[name]
    assert set(experiment.seeded) == {
        stage for stage, spec in stages.items() if "seed" in spec.get("with", {})
    }
    gate = stages[experiment.gate]["inputs"]
    judged = stages[experiment.report]["inputs"]["models"]
    assert (gate["candidate"], gate["baseline"]) == (experiment.candidate, experiment.baseline)
    assert gate["report"] == experiment.report
    assert judged == list(experiment.models)


@pytest.mark.parametrize("name", MEASURED)
def test_the_numbers_told_are_those_of_the_evidence(name: str) -> None:
    section = README.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    file = ROOT / "docs" / "evidence" / f"learning-{name}.json"
    rows = json.loads(file.read_text())["results"] if file.is_file() else []
    measured = all("scores" in row for row in rows) and bool(rows)
    assert measured == ("| seed |" in section)
    if not measured:
        assert f"python -m tests.evidence learning {name}" in section
        return
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        scores = " | ".join(f"{score:.3f}" for score in row["scores"].values())
        effect = f"{row['improvement']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] | {row['verdict']}"
        assert f"| {row['seed']} | {scores} | {effect} |" in section
