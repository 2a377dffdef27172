"""`train.cpo`, `train.orpo` and `train.tpo`: what they take, refuse and leave out, and what they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.stepping import encoder, examples, stepper
from helpers.training import (
    Context,
    completion_rows,
    context_for,
    model_artifact,
    preference_rows,
    three_way_rows,
    train,
    weights,
)
from pydantic import ValidationError

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Scores
from posttrain.errors import DataError
from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.examples import Prepared, prepare
from posttrain_plugins.training import reference

TRAINERS = ("train.cpo", "train.orpo", "train.tpo")
FORMAT = {"train.cpo": "preference", "train.orpo": "preference", "train.tpo": "three_way"}
ROWS = {"preference": preference_rows, "three_way": three_way_rows}
every_trainer = pytest.mark.parametrize("uses", TRAINERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def prepared(uses: str, rows: list[dict[str, Any]], **options: Any) -> Prepared:
    given = {"max_length": None, "truncation": "keep_start", "weight_column": None, **options}
    return prepare(catalogue().stage(uses), rows, encoder(), format_of(FORMAT[uses]), **given)


def run(directory: Path, uses: str, model: Artifact, rows: list[dict[str, Any]], **options: Any) -> Context:
    context = context_for(directory, uses, model, rows, FORMAT[uses], **options)
    train(context)
    return context


# Options


def test_defaults_are_those_of_the_field():
    config = {uses: configured(catalogue().stage(uses)) for uses in TRAINERS}
    assert {uses: (each.learning_rate, each.loss.name) for uses, each in config.items()} == {
        "train.cpo": (1e-6, "cpo"),
        "train.orpo": (1e-6, "orpo"),
        "train.tpo": (5e-7, "tpo"),
    }
    assert config["train.cpo"].loss.options == {"beta": 0.1, "label_smoothing": 0.0, "cpo_alpha": 1.0}
    assert config["train.orpo"].loss.options == {"beta": 0.1}
    assert config["train.tpo"].loss.options == {"beta": 0.01, "label_smoothing": 0.0, "tpo_alpha": 1.0}
    assert not any(catalogue().stage(uses).dropout for uses in TRAINERS)


@pytest.mark.parametrize("uses", ["train.cpo", "train.orpo"])
@pytest.mark.parametrize("loss", ["cpo", "simpo", "alphapo", "orpo"])
def test_pairs_without_a_reference_take_any_loss_that_needs_none(uses: str, loss: str):
    assert configured(catalogue().stage(uses), loss=loss).loss.name == loss


@pytest.mark.parametrize("uses", ["train.cpo", "train.orpo"])
def test_a_loss_that_needs_a_reference_is_refused_with_those_that_fit(uses: str):
    with pytest.raises(ConfigProblems, match="`sigmoid` does not fit") as caught:
        configured(catalogue().stage(uses), loss="sigmoid")
    (problem,) = caught.value.problems
    assert problem.found == "needs reference"
    assert "alphapo, cpo, orpo" in problem.expected
    assert "`train.dpo`" in problem.suggestion


@pytest.mark.parametrize(
    ("uses", "loss"), [("train.tpo", "cpo"), ("train.cpo", "tpo"), ("train.dpo", "tpo_l")]
)
def test_a_loss_of_another_family_is_refused(uses: str, loss: str):
    with pytest.raises(ConfigProblems, match=f"`{loss}` does not fit"):
        configured(catalogue().stage(uses), loss=loss)


@pytest.mark.parametrize(
    ("uses", "loss", "place"),
    [
        ("train.cpo", {"name": "cpo", "beta": 0}, ("loss", "beta")),
        ("train.orpo", {"name": "orpo", "beta": -0.1}, ("loss", "beta")),
        ("train.tpo", {"name": "tpo", "tpo_alpha": 0}, ("loss", "tpo_alpha")),
        ("train.cpo", {"name": "simpo", "margin": 1}, ("loss", "margin")),
    ],
)
def test_impossible_options_of_a_loss_are_refused_at_their_place(
    uses: str, loss: dict[str, Any], place: tuple[str, ...]
):
    with pytest.raises(ConfigProblems) as caught:
        configured(catalogue().stage(uses), loss=loss)
    assert [problem.path for problem in caught.value.problems] == [place]


@every_trainer
def test_dropout_of_an_adapter_would_be_ignored(uses: str):
    with pytest.raises((ConfigProblems, ValidationError), match=r"lora\.dropout would be ignored"):
        configured(catalogue().stage(uses), lora={"dropout": 0.1})


# Rows


@every_trainer
def test_pairs_of_the_same_answer_are_dropped_counted_and_named(uses: str):
    rows = ROWS[FORMAT[uses]](3)
    rows[1]["rejected"] = rows[1]["chosen"]
    found = prepared(uses, rows)
    assert [example.row for example in found.examples] == [0, 2]
    assert found.dropped == {"chosen and rejected are the same": 1}
    assert "row 2" in found.notes[0][1]


def test_a_gold_answer_that_is_the_rejected_one_is_dropped_and_one_that_is_the_chosen_one_is_not():
    rows = three_way_rows(3)
    rows[0]["gold"] = rows[0]["rejected"]
    rows[1]["gold"] = rows[1]["chosen"]
    found = prepared("train.tpo", rows)
    assert [example.row for example in found.examples] == [1, 2]
    assert found.dropped == {"gold and rejected are the same": 1}


def test_where_nothing_is_left_to_learn_the_reason_is_told():
    rows = [{**row, "rejected": row["chosen"]} for row in preference_rows(3)]
    with pytest.raises(DataError, match="no row of the dataset can be trained on"):
        prepared("train.orpo", rows)


@every_trainer
def test_a_negative_weight_is_refused(uses: str):
    rows = [{**row, "w": -1.0} for row in ROWS[FORMAT[uses]](2)]
    with pytest.raises(DataError, match="weight column `w`"):
        prepared(uses, rows, weight_column="w")


def test_a_row_whose_gold_answer_does_not_fit_is_dropped():
    rows = [{"prompt": "q", "chosen": "ab", "rejected": "c", "gold": "d"}]
    long = {"prompt": "qqqq", "chosen": "ab", "rejected": "c", "gold": "d"}
    most = max(len(each.tokens) for each in prepared("train.tpo", rows).examples[0].sequences)
    found = prepared("train.tpo", [*rows, long], max_length=most, truncation="drop")
    assert [example.row for example in found.examples] == [0]


def test_an_example_of_tpo_has_three_sequences_with_one_prompt():
    (example,) = prepared("train.tpo", three_way_rows(1)).examples
    assert [sequence.role for sequence in example.sequences] == ["chosen", "rejected", "gold"]
    assert example.prefix >= 2
    assert [encoder().decode(sequence.tokens, True) for sequence in example.sequences] == [
        "q0yes",
        "q0no",
        "q0sure",
    ]


# The batch


def test_tpo_hands_each_answer_its_own_sum_and_count():
    rows = examples("train.tpo", 2)
    lengths = torch.tensor([each.predicted for row in rows for each in row.sequences])
    logp = -torch.arange(1.0, int(lengths.sum()) + 1)
    scores = Scores(
        examples=rows,
        logp=logp,
        entropy=torch.zeros_like(logp),
        top1=torch.zeros(len(logp), dtype=torch.bool),
        sequence=torch.repeat_interleave(lengths),
        lengths=lengths,
        weight=torch.tensor([2.0, 3.0]),
    )
    trainer = catalogue().stage("train.tpo")
    batch = trainer.batch(scores, configured(trainer))
    sums = [part.sum().item() for part in logp.split(lengths.tolist())]
    assert [batch.chosen.tolist(), batch.rejected.tolist(), batch.gold.tolist()] == [
        sums[0::3],
        sums[1::3],
        sums[2::3],
    ]
    assert batch.chosen_tokens.tolist() == lengths[0::3].tolist()
    assert batch.rejected_tokens.tolist() == lengths[1::3].tolist()
    assert batch.gold_tokens.tolist() == lengths[2::3].tolist()
    assert batch.weight.tolist() == [2.0, 3.0]


# Training


@every_trainer
def test_nothing_is_scored_beforehand(
    tmp_path: Path, model: Artifact, uses: str, monkeypatch: pytest.MonkeyPatch
):
    def forbidden(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a reference was asked for")

    monkeypatch.setattr(reference, "reference_log_probs", forbidden)
    monkeypatch.setattr("posttrain_plugins.training.reference_source.reference_log_probs", forbidden)
    assert stepper(uses, configured(catalogue().stage(uses)).loss.name).needs == frozenset()
    rows = ROWS[FORMAT[uses]](6)
    context = run(tmp_path, uses, model, rows, max_steps=6, batch_size=6, learning_rate=3e-2)
    first, last = (context.seen_metrics[step] for step in (1, 6))
    assert "reference/gap" not in first
    assert last["loss"] < first["loss"]
    assert last["rewards/margin"] > first["rewards/margin"]


@every_trainer
def test_one_step_changes_every_tensor(tmp_path: Path, model: Artifact, uses: str):
    run(tmp_path, uses, model, ROWS[FORMAT[uses]](4), max_steps=1, batch_size=4)
    before, after = weights(model.path), weights(tmp_path / "out-model")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_orpo_on_pairs_is_sft_on_their_chosen_answers_beside_the_odds(tmp_path: Path, model: Artifact):
    """The loss of the first step is that of SFT on the chosen answers and β times the odds' term."""
    rows = preference_rows(4)
    chosen = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    shared = {"max_steps": 1, "batch_size": 4}
    sft = context_for(tmp_path / "sft", "train.sft", model, chosen, "prompt_completion", **shared)
    train(sft)
    losses = [
        run(
            tmp_path / str(beta), "train.orpo", model, rows, loss={"name": "orpo", "beta": beta}, **shared
        ).losses
        for beta in (1.0, 3.0)
    ]
    ((one,), (three,)) = losses
    odds = (three - one) / 2
    assert odds > 0
    assert one - odds == pytest.approx(sft.losses[0], abs=1e-5)


def test_tpo_makes_the_gold_answer_likelier(tmp_path: Path, model: Artifact):
    rows = three_way_rows(4)
    context = run(tmp_path, "train.tpo", model, rows, max_steps=8, batch_size=4, learning_rate=3e-2)
    assert context.seen_metrics[8]["logps/gold"] > context.seen_metrics[1]["logps/gold"] + 1


def test_evaluation_while_training(tmp_path: Path, model: Artifact):
    from helpers.training import dataset_artifact

    context = context_for(
        tmp_path, "train.tpo", model, three_way_rows(4), "three_way", max_steps=2, batch_size=2, eval_steps=1
    )
    held = dataset_artifact(tmp_path / "held", three_way_rows(3), "three_way")
    context.inputs = {**context.inputs, "eval": [held]}
    train(context)
    assert {"eval/loss", "eval/rewards/accuracy", "eval/logps/gold"} <= context.seen_metrics[1].keys()


@pytest.mark.parametrize("loss", ["dft", "focal", "label_smoothing"])
def test_sft_learns_with_other_losses_too(tmp_path: Path, model: Artifact, loss: str):
    rows = completion_rows(6)
    context = context_for(
        tmp_path, "train.sft", model, rows, "prompt_completion", max_steps=12, batch_size=6, loss=loss
    )
    context.config = configured(
        context.stage, loss=loss, max_steps=12, batch_size=6, learning_rate=3e-2, logging_steps=1
    )
    train(context)
    before, after = (context.seen_metrics[step]["token_accuracy"] for step in (1, 12))
    assert after > before


def test_the_mean_over_the_vocabulary_is_computed_where_a_loss_needs_it_alone():
    assert stepper("train.sft", "label_smoothing").wanted.mean_logp
    assert not stepper("train.sft", "nll").wanted.mean_logp
