"""How often process reward models judge steps as their labels do: the report, and what a gate makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.prm_runs import rows
from helpers.stages import run_stage
from helpers.training import dataset_artifact, model_artifact

from posttrain.artifacts.kinds import Kind, PolicyFacts, ReportFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Verdict
from posttrain.errors import DataError, StageError
from posttrain_plugins.evaluation.gate import Gate
from posttrain_plugins.evaluation.report import Item, read_items
from posttrain_plugins.evaluation.scores import ratio
from posttrain_plugins.evaluation.steps import Steps
from posttrain_plugins.evaluation.verdicts import Demands, judge
from posttrain_plugins.models.valued import open_valued, save_valued

PRM = Kind.PROCESS_REWARD_MODEL


def constant(directory: Path, log_odds: float, width: int) -> Artifact:
    """A model that says the same of every step, whatever it reads; its width makes it another artifact."""
    policy = model_artifact(directory / "policy", hidden_size=width)
    model = open_valued(policy, None, PRM).model
    torch.nn.init.zeros_(model.score.weight)
    model.score.bias = torch.nn.Parameter(torch.tensor([0.0, log_odds]))
    (directory / "out").mkdir()
    return as_artifact(directory / "out", save_valued(directory / "out", model, policy.path), PRM)


@pytest.fixture(scope="module")
def hopeful(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return constant(tmp_path_factory.mktemp("hopeful"), 1.0, 16)


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return constant(tmp_path_factory.mktemp("doubtful"), -1.0, 32)


def evaluated(directory: Path, models: list[Artifact], given: Any, **options: Any) -> FakeContext:
    data = dataset_artifact(directory / "data", given, "stepwise")
    return run_stage(
        Steps(), directory, {"models": models, "data": [data]}, **{"step_separator": "\n", **options}
    )


def reported(run: FakeContext) -> Artifact:
    return as_artifact(run.output("report"), run.described["report"][1], Kind.REPORT)


def test_the_share_of_steps_is_told_beside_the_commoner_label(tmp_path: Path, hopeful: Artifact) -> None:
    run = evaluated(tmp_path, [hopeful], rows(12))
    good = [sum(row["labels"]) for row in rows(12)]
    steps = [len(row["labels"]) for row in rows(12)]
    assert 0 < sum(good) < sum(steps) == 30
    share = sum(good) / 30
    assert run.outcome.figures == {"step_accuracy": share, "majority": max(share, 1 - share)}
    written = json.loads((run.output("report") / "report.json").read_text())
    metric = written["models"][hopeful.digest]["metrics"]["step_accuracy"]
    assert metric == ratio(good, steps).as_dict()
    items = read_items(run.output("report"))[hopeful.digest]
    assert [(item.right, item.good, item.steps) for item in items] == list(
        zip(good, good, steps, strict=True)
    )


def test_labels_are_told_by_their_side_and_even_ones_are_left_out(tmp_path: Path, doubtful: Artifact) -> None:
    row = {"prompt": "q", "completions": ["a", "b", "c"], "labels": [0.9, 0.5, 0.2]}
    run = evaluated(tmp_path, [doubtful], [row])
    (item,) = read_items(run.output("report"))[doubtful.digest]
    assert (item.right, item.good, item.steps) == (1, 1, 2)


def test_a_gate_judges_process_reward_models(tmp_path: Path, hopeful: Artifact, doubtful: Artifact) -> None:
    mostly = [{**row, "labels": [True] * len(row["labels"])} for row in rows(40)]
    run = evaluated(tmp_path / "report", [hopeful, doubtful], mostly)
    report = {"report": [reported(run)]}
    for candidate, baseline, verdict in (
        (hopeful, doubtful, Verdict.COMPLETED),
        (doubtful, hopeful, Verdict.REJECTED),
    ):
        given = {**report, "candidate": [candidate], "baseline": [baseline]}
        judged = run_stage(Gate(), tmp_path / candidate.digest, given, metric="step_accuracy")
        assert judged.outcome.verdict is verdict
        assert judged.outcome.figures["improvement"] == (1.0 if verdict is Verdict.COMPLETED else -1.0)


def test_a_gain_is_taken_over_answers() -> None:
    """3 of 4 steps right against 2 of 4, and 1 of 1 against 1 of 1: (1 + 0) / 5."""
    own = [Item(model="a", row=r, prompt=r, steps=s, right=n) for r, s, n in (("x", 4, 3), ("y", 1, 1))]
    other = [Item(model="b", row=r, prompt=r, steps=s, right=n) for r, s, n in (("x", 4, 2), ("y", 1, 1))]
    found = judge(own, other, Demands("step_accuracy"))
    assert found.value.value == pytest.approx(0.8)
    assert found.comparison is not None and found.comparison.estimate.value == pytest.approx(0.2)
    fewer = [other[0].model_copy(update={"steps": 3}), other[1]]
    with pytest.raises(StageError, match="different steps"):
        judge(own, fewer, Demands("step_accuracy"))


def test_answers_that_are_too_long_are_refused_by_row(tmp_path: Path, hopeful: Artifact) -> None:
    long = {"prompt": "q", "completions": ["a" * 4000], "labels": [True]}
    with pytest.raises(DataError, match="longer than the model can take"):
        evaluated(tmp_path, [hopeful], [long])


def test_a_model_without_its_separator_is_found_while_planning() -> None:
    stage = catalogue().stage("evaluate.steps")
    scores = ScoreFacts(
        mean=0.0, deviation=1.0, count=1, accuracy=None, judged=0, held_out=True, separator=None
    )
    inputs = {"models": (Input("train.model", PRM, PolicyFacts(scores=scores)),)}
    (finding,) = stage.check(configured(stage), inputs)
    assert "does not say what ended the steps" in finding.message
    assert list(stage.check(configured(stage, step_separator="\n"), inputs)) == []
    assert stage.predict(configured(stage), inputs)["report"].facts == ReportFacts(report="evaluation")
