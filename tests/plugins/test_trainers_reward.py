"""Training reward models: what comes out, what of it is checked, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import context_for, dataset_artifact, model_artifact, preference_rows, train
from transformers import AutoModelForSequenceClassification

from posttrain.artifacts.kinds import POLICY, DatasetFacts, Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Family, Need
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Input, Level, Outcome
from posttrain.contracts.trainer import Example, Scores, TokenSequence
from posttrain.errors import DataError, StageError
from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.models.valued import numbers, open_valued
from posttrain_plugins.models.valued_record import probes_of
from posttrain_plugins.training import valued

REWARD = Kind.REWARD_MODEL
RANKED = [
    {
        "prompt": f"q{i}",
        "completions": ["no", "yes" * (1 + i % 3), "maybe"][: 2 + i % 2],
        "scores": [0, 2, 1][: 2 + i % 2],
    }
    for i in range(6)
]
SCORED = [{"prompt": f"q{i}", "completion": "ab" * (1 + i % 4), "score": i % 4 / 2} for i in range(6)]


def trained(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    format: str = "preference",
    held_out: Sequence[Mapping[str, Any]] | None = None,
    model: Artifact | None = None,
    **options: Any,
) -> tuple[FakeContext, Outcome]:
    model = model or model_artifact(directory / "policy")
    context = context_for(
        directory / "run", "train.reward", model, rows, format, **{"max_steps": 3, "batch_size": 4, **options}
    )
    if held_out is not None:
        context.inputs = {**context.inputs, "eval": [dataset_artifact(directory / "eval", held_out, format)]}
    return context, train(context)


def made(context: FakeContext) -> Artifact:
    kind, facts = context.described["model"]
    return as_artifact(context.output("model"), facts, kind)


def test_a_reward_model_learns_which_answers_are_better_and_its_accuracy_is_kept(tmp_path: Path):
    rows = preference_rows(8)
    context, outcome = trained(tmp_path, rows, held_out=rows, max_steps=8)
    kind, facts = context.described["model"]
    assert kind is REWARD and facts.head == "LlamaForSequenceClassification"
    assert outcome.figures["eval/accuracy"] == 1.0
    assert (facts.scores.accuracy, facts.scores.judged, facts.scores.held_out) == (1.0, 8, True)
    assert facts.scores.count == 16
    assert facts.scores.mean == pytest.approx(outcome.figures["eval/rewards/mean"], abs=1e-5)
    plain = AutoModelForSequenceClassification.from_pretrained(context.output("model"))
    for probe in probes_of(context.output("model")):
        found = plain(torch.tensor([probe.tokens])).logits[0, 0].item()
        assert found == pytest.approx(probe.values[0], abs=1e-5)
    assert context.warnings == []
    assert any("accuracy 1.000 over 8 judgements of held-out rows" in note for note in context.notes)


@pytest.mark.parametrize(
    "options", [{"lora": {"r": 2}}, {"peft": {"method": "ia3"}}, {"lora": {"r": 2, "dora": True}}]
)
def test_an_adapter_with_its_head_comes_out_and_can_be_trained_on(tmp_path: Path, options: dict[str, Any]):
    rows = preference_rows(8)
    policy = model_artifact(tmp_path / "policy")
    context, _ = trained(tmp_path, rows, model=policy, held_out=rows, **options)
    artifact = made(context)
    assert artifact.kind is REWARD and artifact.facts.base == policy.digest
    opened = open_valued(artifact, context, REWARD, trainable=True)
    learns = {name for name, each in opened.model.named_parameters() if each.requires_grad}
    assert any("score.modules_to_save" in name for name in learns)
    again = FakeContext(
        tmp_path / "again",
        context.stage,
        configured(context.stage, max_steps=1),
        {**context.inputs, "model": [artifact]},
    )
    again.known = {policy.digest: policy}
    train(again)
    assert again.described["model"][1].base == policy.digest


def test_a_reward_model_goes_on_from_its_own_head(tmp_path: Path):
    context, _ = trained(tmp_path, preference_rows(8))
    before = open_valued(made(context), context, REWARD).model
    again, _ = trained(
        tmp_path / "again", preference_rows(8), model=made(context), max_steps=1, learning_rate=1e-9
    )
    after = open_valued(made(again), again, REWARD).model
    assert torch.allclose(before.score.weight, after.score.weight, atol=1e-6)
    assert before.score.weight.abs().sum() > 0


def test_a_frozen_trunk_stays_the_policys(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    context, _ = trained(tmp_path, preference_rows(8), model=policy, trunk="frozen")
    trunk = open_policy(policy, context).model.model.state_dict()
    model = open_valued(made(context), context, REWARD).model
    assert all(torch.equal(trunk[name], each) for name, each in model.model.state_dict().items())
    fresh = open_valued(policy, context, REWARD, seed=context.config.seed).model
    assert not torch.equal(fresh.score.weight, model.score.weight)


@pytest.mark.parametrize(
    ("rows", "format", "loss"),
    [
        (RANKED, "ranked", "plackett_luce"),
        (RANKED, "ranked", "bradley_terry"),
        (RANKED, "ranked", "regression"),
        (SCORED, "scored", "regression"),
    ],
)
def test_rankings_and_scores_are_learned(tmp_path: Path, rows: Any, format: str, loss: str):
    context, outcome = trained(tmp_path, rows, format, held_out=rows, loss=loss, max_steps=12)
    first = context.seen_metrics[1]["loss"]
    assert outcome.figures["eval/loss"] < first
    scores = context.described["model"][1].scores
    judged = {"ranked": 12, "scored": 0}[format]
    assert scores.judged == judged
    assert (scores.accuracy is None) == (judged == 0)
    if judged:
        assert scores.accuracy == pytest.approx(outcome.figures["eval/accuracy"])


def test_the_best_weights_by_accuracy_are_put_out_and_training_stops_early(tmp_path: Path):
    context, outcome = trained(
        tmp_path,
        preference_rows(8),
        held_out=preference_rows(8),
        max_steps=20,
        eval_steps=1,
        metric_for_best_model="eval/accuracy",
        greater_is_better=True,
        load_best_model_at_end=True,
        early_stopping_patience=2,
    )
    assert outcome.steps < 20
    best = max(
        values["eval/accuracy"] for values in context.seen_metrics.values() if "eval/accuracy" in values
    )
    assert outcome.figures["eval/accuracy"] == context.described["model"][1].scores.accuracy == best


def test_margins_are_learned_and_must_be_numbers_in_every_row(tmp_path: Path):
    rows = [{**row, "margin": 3.0} for row in preference_rows(4)]
    with_margin, _ = trained(tmp_path / "with", rows, max_steps=1)
    without, _ = trained(tmp_path / "without", preference_rows(4), max_steps=1)
    assert with_margin.seen_metrics[1]["loss"] > without.seen_metrics[1]["loss"] + 1
    text = [*rows[:2], {**rows[2], "margin": "3.0"}]
    with pytest.raises(DataError, match="`margin`") as caught:
        trained(tmp_path / "text", text)
    assert "row 3" in str(caught.value.where) and "rename the column" in str(caught.value)
    for row in (preference_rows(1)[0], {**rows[0], "margin": None}, {**rows[0], "margin": -0.5, "id": 1}):
        with pytest.raises(DataError, match="`margin`") as caught:
            trained(tmp_path / str(len(row)), [*rows, row])
        assert "row 5" in str(caught.value.where)


@pytest.mark.parametrize("having", [0, 4, 10])
def test_margins_in_some_rows_only_are_told_before_the_start(tmp_path: Path, having: int):
    rows = [{"margin": 1.0, **row} if n < having else row for n, row in enumerate(preference_rows(10))]
    facts = write_rows(tmp_path, rows, "preference")
    stage, given = catalogue().stage("train.reward"), inputs("preference")
    (data,) = given["data"]
    given["data"] = (replace(data, facts=facts),)
    found = [each for each in stage.check(configured(stage), given) if "`margin`" in each.message]
    assert len(found) == (having == 4)
    format, needs = format_of("preference"), frozenset({Need.MARGIN})
    if having != 4:
        assert len(list(stage.rows(rows, format, needs, 0))) == 10
        return
    assert found[0].level is Level.ERROR and "4 of 10 rows" in found[0].message
    assert "`columns: {margin: OTHER}`" in str(found[0].fix)
    with pytest.raises(DataError, match="`margin` in 4 of 10 rows") as refused:
        list(stage.rows(rows, format, needs, 0))
    assert "row 5" in str(refused.value.where)
    with pytest.raises(DataError, match="`margin` in 4 of 10 rows"):
        list(stage.rows(rows[::-1], format, needs, 0))


LOSSES = {name: catalogue().load(Group.LOSS, name) for name in catalogue().names(Group.LOSS)}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.family is Family.REWARD])
def test_a_margin_that_no_loss_reads_is_noted(name: str):
    stage, loss = catalogue().stage("train.reward"), LOSSES[name]
    given = inputs("preference")
    (data,) = given["data"]
    columns = ("chosen", "margin", "prompt", "rejected")
    given["data"] = (replace(data, facts=data.facts.model_copy(update={"columns": columns})),)
    found = [each for each in stage.check(configured(stage, loss=name), given) if "`margin`" in each.message]
    assert len(found) == (Need.MARGIN not in loss.needs)
    for each in found:
        assert each.level is Level.NOTE and f"`{name}`" in each.message and "bradley_terry" in str(each.fix)


def test_a_loss_that_reads_no_margins_is_given_none():
    stage, rows = (
        catalogue().stage("train.reward"),
        [{**preference_rows(1)[0], "margin": 3.0}, *preference_rows(1)],
    )
    format = format_of("preference")
    for row in stage.rows(rows, format, frozenset({Need.RIVALS}), 0):
        assert tuple(stage.verdicts({**row, "margin": "?"}, format, frozenset({Need.RIVALS}))) == (1, 0)
    with pytest.raises(DataError, match="`margin`"):
        list(stage.rows(rows, format, frozenset({Need.MARGIN}), 0))


def test_too_long_rows_and_rows_that_tell_nothing_are_dropped_and_counted(tmp_path: Path):
    long = {"prompt": "q", "chosen": "yes" * 20, "rejected": "no"}
    same = {"prompt": "q", "chosen": "yes", "rejected": "yes"}
    context, outcome = trained(tmp_path, [*preference_rows(4), long, same], max_length=40)
    assert outcome.figures["rows"] == 4 and outcome.figures["rows_dropped"] == 2
    assert any("longer than 40 tokens" in note for note in context.notes)
    assert any("chosen and rejected are the same" in note for note in context.notes)
    tied = [*RANKED, {"prompt": "q", "completions": ["a", "b"], "scores": [1, 1]}]
    context, outcome = trained(tmp_path / "ranked", tied, "ranked")
    assert outcome.figures["rows_dropped"] == 1
    assert any("all answers have the same score" in note for note in context.notes)
    _, outcome = trained(tmp_path / "regression", tied, "ranked", loss="regression")
    assert outcome.figures["rows_dropped"] == 0


def test_a_model_that_is_saved_wrongly_is_not_put_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever was saved is opened again and has to give the same numbers."""

    def other(*given: Any, **named: Any) -> Any:
        opened = open_valued(*given, **named)
        with torch.no_grad():
            opened.model.score.weight.mul_(-1)
        return opened

    monkeypatch.setattr(
        valued, "open_valued", lambda *a, **n: other(*a, **n) if "seed" not in n else open_valued(*a, **n)
    )
    with pytest.raises(StageError, match="gives other numbers"):
        trained(tmp_path, preference_rows(8))


def test_another_accuracy_after_loading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(catalogue().stage("train.reward")), "judged", lambda *_: (0, 8))
    with pytest.raises(StageError, match="judges the held-out rows otherwise"):
        trained(tmp_path, preference_rows(8), held_out=preference_rows(8), max_steps=8)


def test_rewards_and_scores_are_matched_by_row():
    def example(row: int, answers: int, *verdicts: float) -> Example:
        sequence = TokenSequence([1, 2], [False, True], "completion", own=True)
        return Example(row, (sequence,) * answers, verdicts=verdicts)

    examples = [example(0, 2, 1.0, 0.0, 0.5), example(4, 3, 3.0, 1.0, 2.0, 0.0)]
    nothing = torch.zeros(5)
    scores = Scores(
        examples, nothing, nothing, nothing.bool(), torch.arange(5), torch.ones(5).long(),
        torch.tensor([1.0, 2.0]), value=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
        needs=frozenset({Need.MARGIN}),
    )  # fmt: skip
    trainer = catalogue().stage("train.reward")
    batch = trainer.batch(scores, configured(trainer))
    assert batch.score.tolist() == [1.0, 0.0, 3.0, 1.0, 2.0]
    assert batch.margin.tolist() == [0.5, 0.0]
    assert not trainer.batch(replace(scores, needs=frozenset()), configured(trainer)).holds("margin")
    assert batch.example.tolist() == [0, 0, 1, 1, 1]
    assert [each.tolist() for each in batch.pairs] == [[0, 2, 2, 4], [1, 3, 4, 3]]
    assert trainer.judged(examples, {0: [0.1, 0.2], 4: [0.3, 0.4, 0.5]}) == (1, 4)


def inputs(format: str, kind: Kind = Kind.MODEL, **facts: Any) -> dict[str, tuple[Input, ...]]:
    data = DatasetFacts(format=format, columns=format_of(format).columns)
    return {
        "model": (Input("m", kind, PolicyFacts(**facts)),),
        "data": (Input("d", Kind.DATASET, data),),
    }


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({}, inputs("scored"), "hold one each"),
        ({"loss": "plackett_luce"}, inputs("scored"), "hold one each"),
        ({"lora": {"r": 2}}, inputs("preference", REWARD, base="b"), "a head already"),
        ({"lora": {"r": 2}}, inputs("preference", Kind.ADAPTER, base="b"), "already is one"),
        ({"trunk": "frozen"}, inputs("preference", REWARD, base="b"), "would be ignored"),
        ({"quantization": {}}, inputs("preference", Kind.ADAPTER, base="b"), "would be trained"),
        ({"quantization": {}}, inputs("preference"), "cannot be trained"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(options: Any, given: Any, said: str):
    stage = catalogue().stage("train.reward")
    findings = list(stage.check(configured(stage, **options), given))
    assert [each for each in findings if each.level is Level.ERROR and said in each.message]


@pytest.mark.parametrize("format", ["preference", "ranked"])
def test_what_works_is_not_refused(format: str):
    stage = catalogue().stage("train.reward")
    assert not list(stage.check(configured(stage), inputs(format)))
    assert not list(stage.check(configured(stage, loss="regression"), inputs("scored")))


@pytest.mark.parametrize(
    "options",
    [
        {"trunk": "frozen", "lora": {"r": 2}},
        {"lora": {"r": 2, "dropout": 0.1}},
        {"truncation": "keep_start"},
        {"loss": "sigmoid"},
        {"learning_rate": 0},
        {"loss": {"name": "bradley_terry", "center": -1}},
    ],
)
def test_options_that_would_be_ignored_are_refused(options: Any):
    with pytest.raises(ConfigProblems):
        configured(catalogue().stage("train.reward"), **options)


def test_a_reward_model_is_predicted_without_what_the_policy_had():
    stage = catalogue().stage("train.reward")
    given = inputs("preference", head="LlamaForCausalLM", tokenizer="t", parameters=5)
    for options, base in (({}, None), ({"lora": {"r": 2}}, None)):
        prediction = stage.predict(configured(stage, **options), given)["model"]
        assert prediction.kind is REWARD
        assert (prediction.facts.head, prediction.facts.parameters, prediction.facts.base) == (
            None,
            None,
            base,
        )
        assert prediction.facts.tokenizer == "t"
    (port,) = stage.outputs(configured(stage))
    assert port.kinds == {REWARD}
    assert stage.inputs[0].kinds == POLICY | {REWARD}


def test_numbers_are_those_of_training(tmp_path: Path):
    """Rewards before saving are rewards after loading."""
    context, _ = trained(tmp_path, preference_rows(8), lora={"r": 2})
    model = open_valued(made(context), context, REWARD).model
    probes = probes_of(context.output("model"))
    assert len(probes) == valued.PROBES
    found = [value for each in numbers(model, probes) for value in each]
    assert found == pytest.approx([value for each in probes for value in each.values], abs=1e-6)
