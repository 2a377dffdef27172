from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.training import (
    Context,
    context_for,
    dataset_artifact,
    model_artifact,
    preference_rows,
    train,
    unpaired_rows,
    weights,
)

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Finding, Input
from posttrain.errors import StageError
from posttrain.pipeline import Pipeline
from posttrain_plugins.handoffs.log_probs import LogProbsOther
from posttrain_plugins.training import reference_source
from posttrain_plugins.training.scoring import run

STAGE = catalogue().stage("data.log_probs")
PAIRS, UNPAIRED = preference_rows(6), unpaired_rows(6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def scored(
    directory: Path, model: Artifact, rows: list[dict[str, Any]], format: str, **options: Any
) -> Artifact:
    data = dataset_artifact(directory / "data", rows, format)
    context = Context(directory, STAGE, configured(STAGE, **options), {"model": [model], "data": [data]})
    outcome = run(context)
    assert outcome.figures["rows"] == len(rows)
    return context.result("log_probs")


def training(
    directory: Path, uses: str, model: Artifact, given: Artifact | None = None, **options: Any
) -> Context:
    rows, format = (PAIRS, "preference") if uses == "train.dpo" else (UNPAIRED, "unpaired_preference")
    context = context_for(directory, uses, model, rows, format, max_steps=3, batch_size=3, **options)
    if given is not None:
        context.inputs = {**context.inputs, "log_probs": [given]}
    return context


@pytest.mark.parametrize(
    ("uses", "loss", "options"),
    [
        ("train.dpo", "sigmoid", {}),
        ("train.dpo", "sigmoid", {"tokens": True}),
        ("train.kto", "kto", {"mismatched": True}),
        ("train.kto", "bco", {}),
    ],
)
def test_training_is_the_same_to_the_last_bit(
    tmp_path: Path,
    model: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    uses: str,
    loss: str,
    options: dict[str, Any],
):
    own = training(tmp_path / "own", uses, model, loss=loss)
    train(own)
    rows, format = (PAIRS, "preference") if uses == "train.dpo" else (UNPAIRED, "unpaired_preference")
    given = scored(tmp_path / "scored", model, rows, format, **options)

    def unwanted(*_: Any) -> None:
        raise AssertionError("the reference is scored again")

    monkeypatch.setattr(reference_source, "reference_log_probs", unwanted)
    # Another order of another loss's strength: what was scored serves a sweep.
    for name, more in (("same", {}), ("other", {"loss": {"name": loss, "beta": 0.3}, "lora": {"r": 2}})):
        context = training(tmp_path / name, uses, model, given, **{"loss": loss, **more})
        train(context)
        if name == "same":
            assert context.losses == own.losses
            found, expected = (weights(each.output("model")) for each in (context, own))
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_facts_say_what_made_them(tmp_path: Path, model: Artifact):
    given = scored(tmp_path, model, UNPAIRED, "unpaired_preference", mismatched=True, seed=7, max_length=90)
    facts = given.facts.log_probs
    assert (given.kind, given.facts.rows) == (Kind.LOG_PROBS, 6)
    assert facts.policy == model.digest
    assert (facts.roles, facts.seed, facts.tokens) == (("completion", "mismatched"), 7, False)
    assert facts.options["max_length"] == 90 and facts.options["precision"] == "float32"


@pytest.mark.parametrize(
    "options", [{"max_length": 20}, {"bf16": True}, {"seed": 3, "loss": "kto"}], ids=lambda each: str(each)
)
def test_other_options_are_refused_before_the_first_step(
    tmp_path: Path, model: Artifact, options: dict[str, Any]
):
    given = scored(tmp_path / "scored", model, UNPAIRED, "unpaired_preference", mismatched=True)
    with pytest.raises(StageError, match="not those of this policy"):
        train(training(tmp_path, "train.kto", model, given, **options))


def test_other_rows_are_refused(tmp_path: Path, model: Artifact):
    given = scored(tmp_path / "scored", model, [*PAIRS[1:], PAIRS[0]], "preference")
    with pytest.raises(StageError, match="not those of this policy"):
        train(training(tmp_path, "train.dpo", model, given))


def test_sums_are_not_enough_for_a_loss_that_looks_into_answers(tmp_path: Path, model: Artifact):
    given = scored(tmp_path / "scored", model, PAIRS, "preference")
    with pytest.raises(StageError, match="each token"):
        train(training(tmp_path, "train.dpo", model, given, ld_alpha=0.5))
    whole = scored(tmp_path / "whole", model, PAIRS, "preference", tokens=True)
    own = training(tmp_path / "own", "train.dpo", model, ld_alpha=0.5)
    context = training(tmp_path / "given", "train.dpo", model, whole, ld_alpha=0.5)
    train(own), train(context)
    assert context.losses == own.losses


# The rule


def site(
    model: Input,
    data: Input,
    given: Input,
    maker: Site | None = None,
    uses: str = "train.kto",
    **options: Any,
) -> Site:
    stage = catalogue().stage(uses)
    inputs = {"model": [model], "data": [data], "log_probs": [given]}
    upstream = {} if maker is None else {given.origin: maker}
    return Site("train", uses, stage, configured(stage, **options), inputs, upstream)


def made(origin: str, artifact: Artifact) -> Input:
    return Input(origin, artifact.kind, artifact.facts, artifact)


def expected(origin: str, artifact: Artifact) -> Input:
    return Input(origin, artifact.kind, artifact.facts)


def planned(model: Input, data: Input, **options: Any) -> tuple[Input, Site]:
    """What the log-probs will be, and the site that makes them."""
    config = configured(STAGE, **options)
    prediction = STAGE.predict(config, {"model": [model], "data": [data]})["log_probs"]
    given = Input("ref.log_probs", prediction.kind, prediction.facts)
    return given, Site("ref", "data.log_probs", STAGE, config, {"model": [model], "data": [data]}, {})


def findings(found: Site) -> list[Finding]:
    return list(LogProbsOther().check(found))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return dataset_artifact(tmp_path_factory.mktemp("data"), UNPAIRED, "unpaired_preference")


@pytest.mark.parametrize("known", [made, expected])
def test_nothing_is_said_where_all_is_the_same(model: Artifact, data: Artifact, known: Any):
    given, maker = planned(known("sft.model", model), known("rows.data", data), mismatched=True)
    assert findings(site(known("sft.model", model), known("rows.data", data), given, maker)) == []


@pytest.mark.parametrize("port", ["model", "data"])
@pytest.mark.parametrize("known", [made, expected])
def test_another_policy_or_dataset_is_refused_at_plan(
    tmp_path: Path, model: Artifact, data: Artifact, port: str, known: Any
):
    given, maker = planned(known("sft.model", model), known("rows.data", data), mismatched=True)
    # Facts alone tell made-up artifacts apart here.
    others = {
        "model": model_artifact(tmp_path / "other", hidden_size=32),
        "data": dataset_artifact(tmp_path / "rows", UNPAIRED[:4], "unpaired_preference"),
    }
    sources = {"model": known("sft.model", model), "data": known("rows.data", data)}
    sources[port] = known("another.one", others[port])
    (finding,) = findings(site(sources["model"], sources["data"], given, maker))
    assert finding.level == "error" and "another.one" in finding.message and f"`{port}`" in finding.message


@pytest.mark.parametrize(
    ("scoring", "options", "said"),
    [
        ({"mismatched": True, "max_length": 40}, {}, "max_length 40"),
        ({"mismatched": True}, {"truncation": "keep_end"}, "truncation keep_start"),
        ({"mismatched": True}, {"bf16": True}, "precision float32"),
        ({"mismatched": True}, {"seed": 1}, "seed 42"),
        ({}, {}, "lacks the answers of other rows"),
        ({"mismatched": True}, {"loss": "bco"}, "does not need"),
    ],
)
def test_other_options_are_refused_at_plan(
    model: Artifact, data: Artifact, scoring: dict[str, Any], options: dict[str, Any], said: str
):
    policy, rows = made("sft.model", model), made("rows.data", data)
    given, maker = planned(policy, rows, **scoring)
    (finding,) = findings(site(policy, rows, given, maker, **options))
    assert said in finding.message


def test_log_probs_that_no_loss_reads_are_refused_at_plan(tmp_path: Path, model: Artifact):
    policy = made("sft.model", model)
    rows = made("rows.data", dataset_artifact(tmp_path, PAIRS, "preference"))
    given, maker = planned(policy, rows)
    found = findings(site(policy, rows, given, maker, uses="train.dpo", loss="simpo"))
    assert ["would be ignored" in each.message for each in found] == [True]
    (looking,) = findings(site(policy, rows, given, maker, uses="train.dpo", ld_alpha=0.5))
    assert "each token" in looking.message


def test_answers_of_other_rows_belong_to_answers_that_are_good_or_bad(tmp_path: Path, model: Artifact):
    rows = made("rows.data", dataset_artifact(tmp_path, PAIRS, "preference"))
    config = configured(STAGE, mismatched=True)
    (finding,) = STAGE.check(config, {"model": [made("m", model)], "data": [rows]})
    assert "mismatched would be ignored" in finding.message
    assert json.loads(config.model_dump_json())["mismatched"] is True
    with pytest.raises(Exception, match="seed would be ignored"):
        configured(STAGE, seed=1)


# A sweep


@pytest.mark.slow
def test_a_sweep_scores_the_reference_once(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in UNPAIRED), encoding="utf-8"
    )
    beside: dict[str, Any] = {"model": "base", "data": "rows"}
    stages: dict[str, Any] = {
        "rows": {"uses": "data.load", "with": {"path": "rows.jsonl"}},
        "base": {"uses": "model.init", "inputs": {"data": "rows"}},
        "ref": {"uses": "data.log_probs", "inputs": beside, "with": {"mismatched": True}},
        "kto": {
            "uses": "train.kto",
            "inputs": {**beside, "log_probs": "ref"},
            "with": {"max_steps": 1, "loss": {"name": "kto"}},
            "matrix": {"loss.beta": [0.1, 0.5]},
        },
    }
    pipeline = Pipeline(stages, base=tmp_path)
    assert pipeline.plan(tmp_path / ".posttrain").refused == []
    report = pipeline.run(tmp_path / ".posttrain", runner="sequential", track=False)
    report.require_completed()
    logs = {path.parent.parent.name: path.read_text() for path in tmp_path.rglob("events.jsonl")}
    scoring = [name for name, text in logs.items() if '"reference rows"' in text]
    assert len(logs) == 5 and scoring == []
    wrong = {**stages, "ref": {**stages["ref"], "with": {"mismatched": True, "max_length": 30}}}
    refused = Pipeline(wrong, base=tmp_path).plan(tmp_path / ".posttrain")
    assert {each.code for each in refused.refused} == {"H044"}
