"""Training process reward models: what comes out, what it is good for, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import context_for, dataset_artifact, model_artifact, train
from transformers import AutoModelForTokenClassification

from posttrain.artifacts.kinds import POLICY, Kind, PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Outcome
from posttrain.contracts.trainer import StepEnds
from posttrain.errors import DataError
from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.score_steps import run as score_steps
from posttrain_plugins.models.valued import open_valued
from posttrain_plugins.models.valued_record import probes_of
from posttrain_plugins.rewards.process import ProcessScorer, answered

PRM = Kind.PROCESS_REWARD_MODEL
Rows = Sequence[Mapping[str, Any]]


def sums(count: int = 14) -> list[dict[str, Any]]:
    """Steps that say `ok` are right, steps that say `no` are wrong: all answers of one to three, the short first."""
    patterns = [pattern for length in (1, 2, 3) for pattern in product((True, False), repeat=length)]
    return [
        {
            "prompt": "q: ",
            "completions": ["ok" if right else "no" for right in labels],
            "labels": list(labels),
        }
        for labels in patterns[:count]
    ]


def conversations(count: int = 14) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completions": [[{"role": "assistant", "content": step}] for step in row["completions"]],
            "labels": row["labels"],
        }
        for row in sums(count)
    ]


def trained(
    directory: Path, rows: Rows, held_out: Rows | None = None, model: Artifact | None = None, **options: Any
) -> tuple[FakeContext, Outcome]:
    model = model or model_artifact(directory / "policy")
    options = {"max_steps": 3, "batch_size": 4, **options}
    context = context_for(directory / "run", "train.prm", model, rows, "stepwise", **options)
    if held_out is not None:
        data = dataset_artifact(directory / "eval", held_out, "stepwise")
        context.inputs = {**context.inputs, "eval": [data]}
    return context, train(context)


def made(context: FakeContext) -> Artifact:
    kind, facts = context.described["model"]
    return as_artifact(context.output("model"), facts, kind)


@pytest.mark.parametrize("rows", [sums, conversations])
def test_it_learns_which_steps_are_right_and_its_accuracy_is_kept(tmp_path: Path, rows: Any):
    context, outcome = trained(tmp_path, rows(), held_out=rows(8), max_steps=60, learning_rate=3e-2)
    kind, facts = context.described["model"]
    assert kind is PRM
    assert facts.head == "LlamaForTokenClassification"
    assert facts.template is not None
    steps = sum(len(row["labels"]) for row in rows(8))
    assert outcome.figures["eval/accuracy"] == 1.0
    assert outcome.figures["eval/answers/accuracy"] == 1.0
    assert (facts.scores.accuracy, facts.scores.judged, facts.scores.held_out) == (1.0, steps, True)
    assert facts.scores.separator == "\n"
    assert any(f"accuracy 1.000 over {steps} judgements of held-out rows" in note for note in context.notes)


def test_transformers_opens_what_is_saved_and_reads_the_same_numbers(tmp_path: Path):
    context, _ = trained(tmp_path, sums())
    plain = AutoModelForTokenClassification.from_pretrained(context.output("model"))
    assert plain.config.num_labels == 2
    probes = probes_of(context.output("model"))
    assert probes
    for probe in probes:
        outputs = plain(torch.tensor([probe.tokens])).logits[0, list(probe.places)]
        torch.testing.assert_close(
            outputs.log_softmax(-1)[:, 1].exp(), torch.tensor(probe.values).sigmoid(), atol=1e-5, rtol=0
        )


def test_an_adapter_comes_out_with_its_head_and_can_be_trained_on(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    context, _ = trained(tmp_path, sums(), model=policy, held_out=sums(), lora={"r": 2})
    artifact = made(context)
    assert artifact.kind is PRM
    assert artifact.facts.base == policy.digest
    opened = open_valued(artifact, context, PRM, trainable=True)
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
    assert again.described["model"][0] is PRM


def test_the_last_step_alone_is_learned_and_all_are_judged(tmp_path: Path):
    _, whole = trained(tmp_path / "whole", sums(), held_out=sums(), max_steps=1)
    context, last = trained(
        tmp_path / "last", sums(), held_out=sums(), max_steps=1, train_on_last_step_only=True
    )
    assert whole.figures["loss"] != last.figures["loss"]
    assert context.described["model"][1].scores.count == sum(len(row["labels"]) for row in sums())
    stage, config = context.stage, context.config
    assert stage.supervise(config) == StepEnds("\n", last=True)
    assert stage.supervise_held_out(config) == StepEnds("\n")


def test_soft_labels_are_learned_as_probabilities(tmp_path: Path):
    rows = [{"prompt": f"q{i}: ", "completions": ["a", "b"], "labels": [0.25, 0.75]} for i in range(8)]
    context, outcome = trained(tmp_path, rows, max_steps=40, learning_rate=3e-2)
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert outcome.figures["loss"] == pytest.approx(entropy, abs=5e-3)
    (found,) = ProcessScorer.open(made(context), context).score([answered("q0: ", "a\nb")])
    assert found is not None
    assert found.probabilities == pytest.approx((0.25, 0.75), abs=0.05)


@pytest.mark.parametrize(
    ("label", "told"), [(True, "6 of 6 steps are right, none is wrong"), (0.5, "6 of 6 steps are undecided")]
)
def test_labels_that_are_all_the_same_are_told(tmp_path: Path, label: Any, told: str):
    rows = [{"prompt": f"q{i}: ", "completions": ["a", "b"], "labels": [label] * 2} for i in range(3)]
    context, _ = trained(tmp_path, rows, max_steps=1)
    assert any(f"labels of one class only: {told}" in warning for warning in context.warnings)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"completions": ["a", ""]}, "`completions` step 2 is empty"),
        ({"completions": ["a"]}, "`labels` has 2 entries for 1 `completions`"),
        ({"labels": [True, "no"]}, "`labels` entry 2 is the string"),
    ],
)
def test_rows_that_cannot_be_learned_never_become_a_dataset(tmp_path: Path, row: Any, told: str):
    good = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
    with pytest.raises(DataError, match=told):
        dataset_artifact(tmp_path / "data", [good, {**good, **row}], "stepwise")


def test_options_that_mean_nothing_are_refused():
    for options in ({"lora": {"dropout": 0.1}}, {"loss": "sigmoid"}, {"step_seperator": "x"}):
        with pytest.raises(ConfigProblems):
            configured(catalogue().stage("train.prm"), **options)


def test_the_plan_knows_what_comes_out():
    stage = catalogue().stage("train.prm")
    config = configured(stage)
    (port, *_) = stage.inputs
    assert port.kinds == POLICY | {PRM}
    assert stage.outputs(config)[0].kinds == {PRM}
    source = Input("load.model", Kind.MODEL, PolicyFacts(head="LlamaForCausalLM", layers=2))
    predicted = stage.predict(config, {"model": [source]})["model"]
    assert (predicted.kind, predicted.facts.head, predicted.facts.layers) == (PRM, None, 2)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeContext, Artifact]:
    context, _ = trained(
        tmp_path_factory.mktemp("scorer"), sums(), max_steps=60, learning_rate=3e-2, step_separator=";"
    )
    return context, made(context)


def test_free_text_is_scored_step_by_step(scorer: tuple[FakeContext, Artifact]):
    context, artifact = scorer
    opened = ProcessScorer.open(artifact, context)
    assert opened.separator == ";"
    texts = ["ok\nno", "ok\nok\nok", "no"]
    alone = [opened.score([answered("q: ", text)])[0] for text in texts]
    together = opened.score([answered("q: ", text) for text in texts])
    for one, other, count in zip(alone, together, (2, 3, 1), strict=True):
        assert one is not None
        assert other is not None
        assert len(one.log_odds) == count
        assert one.log_odds == pytest.approx(other.log_odds, abs=1e-5), "whatever it is batched with"
    first, second, third = together
    assert [each > 0.5 for each in first.probabilities] == [True, False]
    assert first.reward("min") == pytest.approx(min(first.probabilities))
    assert first.reward("last") == first.probabilities[-1]
    assert second.reward("product") > 0.5 > third.reward("product")


def test_an_answer_that_is_too_long_abstains(scorer: tuple[FakeContext, Artifact]):
    context, artifact = scorer
    opened = ProcessScorer.open(artifact, context)
    found = opened.score([answered("q: ", "ok"), answered("q: ", "ok" * 200)])
    assert [each is None for each in found] == [False, True]
    assert opened.account.dropped == {"longer than 128 tokens": 1}


def test_a_dataset_gets_scores(scorer: tuple[FakeContext, Artifact], tmp_path: Path):
    known, artifact = scorer
    rows = [
        {"prompt": "q1: ", "completion": "1. ok\n2. no", "source": "x"},
        {"prompt": "q2: ", "completion": "ok"},
        {"prompt": "q2: ", "completion": "ok" * 200},
    ]
    stage = catalogue().stage("data.score_steps")
    data = dataset_artifact(tmp_path / "data", rows, "prompt_completion")
    inputs = {"model": [artifact], "data": [data]}
    context = FakeContext(tmp_path, stage, configured(stage, aggregation="mean"), inputs)
    context.known = known.known
    outcome = score_steps(context)
    kind, facts = context.described["data"]
    assert (kind, facts.format, facts.rows) == (Kind.DATASET, "scored", 2)
    first, second = read_rows(context.output("data"))
    assert first["source"] == "x"
    assert first["steps"] == ["1. ok", "2. no"]
    assert first["score"] == pytest.approx(sum(first["step_probabilities"]) / 2)
    assert second["steps"] == ["ok"]
    assert outcome.figures["rows_dropped"] == 1
    assert any("1 row(s) left out: longer than the model can take" in each for each in context.warnings)


def test_rows_in_steps_are_scored_as_they_are(scorer: tuple[FakeContext, Artifact], tmp_path: Path):
    known, artifact = scorer
    stage = catalogue().stage("data.score_steps")
    inputs = {"model": [artifact], "data": [dataset_artifact(tmp_path / "data", sums(3), "stepwise")]}
    context = FakeContext(tmp_path, stage, configured(stage), inputs)
    context.known = known.known
    score_steps(context)
    rows = read_rows(context.output("data"))
    assert [row["steps"] for row in rows] == [row["completions"] for row in sums(3)]
    assert all(row["score"] == min(row["step_probabilities"]) for row in rows)
    assert all("labels" not in row for row in rows)


def test_a_model_that_does_not_name_its_separator_is_refused(tmp_path: Path):
    stage = catalogue().stage("data.score_steps")
    facts = PolicyFacts(scores=ScoreFacts(mean=0.0))
    model = Input("load.model", PRM, facts)
    (finding,) = stage.check(configured(stage), {"model": [model]})
    assert "does not say what ended the steps" in finding.message
    assert list(stage.check(configured(stage, step_separator="\n"), {"model": [model]})) == []
    with pytest.raises(DataError, match="does not say what ended the steps"):
        ProcessScorer.open(as_artifact(tmp_path, facts, PRM), None)
