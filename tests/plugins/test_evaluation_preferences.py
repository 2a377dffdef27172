"""How often models prefer the better answer: the report, and what a gate makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue
from helpers.models import as_artifact
from helpers.stages import run_stage
from helpers.training import context_for, dataset_artifact, model_artifact, preference_rows, train

from posttrain.artifacts.kinds import Kind, PolicyFacts, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Verdict
from posttrain.errors import DataError, StageError
from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.evaluation.gate import Gate
from posttrain_plugins.evaluation.preferences import Preferences
from posttrain_plugins.evaluation.report import read_items
from posttrain_plugins.evaluation.rewards import values_of
from posttrain_plugins.evaluation.scores import proportion
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.models.valued import open_valued, save_valued

REWARD = Kind.REWARD_MODEL


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = tmp_path_factory.mktemp("learned")
    policy = model_artifact(directory / "policy")
    context = context_for(
        directory / "run", "train.reward", policy, preference_rows(8), "preference", max_steps=8
    )
    train(context)
    kind, facts = context.described["model"]
    return as_artifact(context.output("model"), facts, kind)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A head of zeros: every answer gets the same."""
    directory = tmp_path_factory.mktemp("untrained")
    policy = model_artifact(directory / "policy")
    model = open_valued(policy, object(), REWARD).model
    torch.nn.init.zeros_(model.score.weight)
    (directory / "out").mkdir()
    return as_artifact(directory / "out", save_valued(directory / "out", model, policy.path), REWARD)


def evaluated(directory: Path, models: list[Artifact], rows: Any, **options: Any) -> FakeContext:
    data = dataset_artifact(directory / "data", rows, "preference")
    return run_stage(Preferences(), directory, {"models": models, "data": [data]}, **options)


def reported(run: FakeContext) -> Artifact:
    return as_artifact(run.output("report"), run.described["report"][1], Kind.REPORT)


def test_the_share_of_pairs_is_told_with_its_interval(tmp_path: Path, learned: Artifact):
    rows = preference_rows(8)
    rows[3] = {**rows[3], "chosen": rows[3]["rejected"], "rejected": rows[3]["chosen"]}
    run = evaluated(tmp_path, [learned], rows)
    assert run.outcome.figures == {"pair_accuracy": 7 / 8}
    expected = proportion(7, 8)
    written = json.loads((run.output("report") / "report.json").read_text())
    metric = written["models"][learned.digest]["metrics"]["pair_accuracy"]
    assert metric == expected.as_dict()
    assert f"[{expected.low:.3g}, {expected.high:.3g}] of 8" in run.outcome.summary
    items = read_items(run.output("report"))[learned.digest]
    assert [item.correct for item in items] == [number != 3 for number in range(8)]
    assert all((item.margin > 0) == item.correct for item in items)
    facts = run.described["report"][1]
    assert facts == ReportFacts(
        report="evaluation",
        figures={"pair_accuracy": 7 / 8},
        subjects=(learned.digest,),
        data=run.inputs["data"][0].digest,
    )


def test_a_model_that_tells_nothing_apart_prefers_nothing_and_it_is_said(tmp_path: Path, untrained: Artifact):
    run = evaluated(tmp_path, [untrained], preference_rows(4))
    assert run.outcome.figures == {"pair_accuracy": 0.0}
    assert any("of 4 of 4 pairs the same number" in warning for warning in run.warnings)


def test_a_gate_judges_reward_models(tmp_path: Path, learned: Artifact, untrained: Artifact):
    run = evaluated(tmp_path / "report", [learned, untrained], preference_rows(8))
    given = {"report": [reported(run)], "candidate": [learned]}
    passed = run_stage(Gate(), tmp_path / "passed", given, metric="pair_accuracy", threshold=0.6)
    assert passed.outcome.verdict is Verdict.COMPLETED
    undecided = run_stage(Gate(), tmp_path / "undecided", given, metric="pair_accuracy", threshold=0.9)
    assert undecided.outcome.verdict is Verdict.INCONCLUSIVE
    better = {**given, "baseline": [untrained]}
    assert (
        run_stage(Gate(), tmp_path / "better", better, metric="pair_accuracy").outcome.verdict
        is Verdict.COMPLETED
    )
    worse = {"report": given["report"], "candidate": [untrained], "baseline": [learned]}
    rejected = run_stage(Gate(), tmp_path / "worse", worse, metric="pair_accuracy")
    assert rejected.outcome.verdict is Verdict.REJECTED


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("policy"))


def test_a_policy_prefers_the_answer_that_it_is_likelier_to_give(tmp_path: Path, policy: Artifact):
    rows = [
        {"prompt": "ab", "chosen": "ba", "rejected": "abab"},
        {"prompt": "b", "chosen": "aaaa", "rejected": "b"},
    ]
    run = evaluated(tmp_path / "sum", [policy], rows)
    mean = evaluated(tmp_path / "mean", [policy], rows, length_normalized=True)
    opened = open_policy(policy, object())
    for row, summed, normalized in zip(rows, _items(run, policy), _items(mean, policy), strict=True):
        (chosen, many), (rejected, few) = (
            _likelihood(opened, row["prompt"], row[side]) for side in ("chosen", "rejected")
        )
        assert summed.margin == pytest.approx(chosen - rejected, abs=1e-5)
        assert normalized.margin == pytest.approx(chosen / many - rejected / few, abs=1e-5)
        assert summed.correct == (chosen > rejected)


def _items(run: FakeContext, model: Artifact) -> list[Any]:
    return read_items(run.output("report"))[model.digest]


def _likelihood(opened: Any, prompt: str, answer: str) -> tuple[float, int]:
    """Σ log p of an answer's tokens by a plain forward pass, and how many they are."""
    encoded = opened.encoder.encode_pair(prompt, answer)
    tokens = torch.tensor([encoded.tokens])
    with torch.no_grad():
        logp = opened.model(tokens).logits[0].double().log_softmax(-1)
    places = [place for place, counts in enumerate(encoded.supervised) if counts]
    return sum(float(logp[place - 1, encoded.tokens[place]]) for place in places), len(places)


def test_policies_and_reward_models_stand_in_one_report(tmp_path: Path, policy: Artifact, learned: Artifact):
    run = evaluated(tmp_path, [policy, learned], preference_rows(4))
    assert len(_items(run, policy)) == len(_items(run, learned)) == 4


def test_length_normalized_without_a_policy_is_refused():
    from helpers.contexts import configured

    stage = catalogue().stage("evaluate.preferences")
    config = configured(stage, length_normalized=True)
    (found,) = stage.check(config, {"models": (_predicted(),)})
    assert "would be ignored" in found.message
    assert not list(stage.check(configured(stage), {"models": (_predicted(),)}))


def test_a_limit_keeps_rows_by_their_content(tmp_path: Path, learned: Artifact):
    rows = preference_rows(8)
    one = evaluated(tmp_path / "one", [learned], rows, limit=3)
    other = evaluated(tmp_path / "other", [learned], rows[::-1], limit=3)
    found = [{item.row for item in read_items(run.output("report"))[learned.digest]} for run in (one, other)]
    assert found[0] == found[1] and len(found[0]) == 3


def test_equal_sides_are_left_out_and_too_long_ones_refused(tmp_path: Path, learned: Artifact):
    same = {"prompt": "q", "chosen": "yes", "rejected": "yes"}
    run = evaluated(tmp_path / "same", [learned], [*preference_rows(2), same])
    assert len(read_items(run.output("report"))[learned.digest]) == 2
    assert any("chosen and rejected are the same" in note for note in run.notes)
    with pytest.raises(DataError, match="too long"):
        evaluated(tmp_path / "long", [learned], [{**same, "chosen": "yes" * 60}])


def test_batches_change_no_number(tmp_path: Path, learned: Artifact):
    from posttrain.contracts.trainer import Example, TokenSequence

    model = open_valued(learned, object(), REWARD).model
    examples = [
        Example(row, (TokenSequence([5] * (row + 2), [False] * (row + 1) + [True], "completion", own=True),))
        for row in range(6)
    ]
    alone, together = (values_of(model, examples, tokens) for tokens in (1, 1000))
    assert alone.keys() == together.keys() == set(range(6))
    for row, values in alone.items():
        assert values == pytest.approx(together[row], abs=1e-6)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    with pytest.raises(StageError, match="not finite"):
        values_of(model, examples, 1000)


def test_metrics_of_policies_and_of_reward_models_are_kept_apart():
    from helpers.contexts import configured

    with pytest.raises(ConfigProblems):
        configured(catalogue().stage("evaluate"), metrics=["pair_accuracy"])
    stage = catalogue().stage("evaluate.preferences")
    predicted = stage.predict(configured(stage), {"models": (_predicted(),)})["report"]
    assert predicted.facts == ReportFacts(report="evaluation")


def _predicted() -> Any:
    from posttrain.contracts.stage import Input

    return Input("train.model", REWARD, PolicyFacts())
