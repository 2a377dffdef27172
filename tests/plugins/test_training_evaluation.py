"""Evaluation while training, the best checkpoint, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.training import (
    Context,
    completion_rows,
    context_for,
    dataset_artifact,
    model_artifact,
    preference_rows,
    train,
    weights,
)
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Certainty, Input
from posttrain.errors import Interrupted, SpecError, TrainingDiverged
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training.evaluation import Best

FORMATS = {"train.sft": "prompt_completion", "train.dpo": "preference"}
BASE: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
EVAL = {**BASE, "max_steps": 4}
HELD_OUT = [{"prompt": f"ask {i}?", "completion": "ba" * (1 + i * 5 % 7)} for i in range(9)]
RISING = {**BASE, "max_steps": 8, "eval_steps": 1, "learning_rate": 0.05}
"""The training rows say the opposite of the held-out ones, so after some steps their loss rises."""
LEARNED = [{"prompt": "q", "completion": "yes"}, {"prompt": "q", "completion": "yes yes"}]
OTHER = [{"prompt": "q", "completion": "yes no"}]


class Killed(BaseException):
    """What SIGKILL would do."""


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    return model_artifact(tmp_path / "model")


def context(
    directory: Path,
    model: Artifact,
    held_out: Sequence[Mapping[str, Any]],
    uses: str = "train.sft",
    rows: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Context:
    rows = rows or (completion_rows() if uses == "train.sft" else preference_rows())
    made = context_for(directory, uses, model, rows, FORMATS[uses], **options)
    data = dataset_artifact(directory / "held-out", held_out, FORMATS[uses])
    made.inputs = {**made.inputs, "eval": [data]}
    return made


def evaluations(context: Context, name: str = "eval/loss") -> dict[int, float]:
    return {step: values[name] for step, values in context.seen_metrics.items() if name in values}


def plain_loss(directory: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """−log π of every supervised token, one row at a time, over their number."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    encoder = Encoder.open(directory)
    total = count = 0.0
    for row in rows:
        encoded = encoder.encode_pair(row["prompt"], row["completion"])
        tokens = torch.tensor([encoded.tokens])
        with torch.no_grad():
            logp = model(tokens).logits[0, :-1].double().log_softmax(-1)
        chosen = torch.tensor(encoded.supervised[1:]).bool()
        total -= float(logp.gather(1, tokens[0, 1:, None])[:, 0][chosen].sum())
        count += int(chosen.sum())
    return total / count


def rising(directory: Path, model: Artifact, **options: Any) -> Context:
    return context(directory, model, OTHER, rows=LEARNED, **{**RISING, **options})


# What is measured


@pytest.mark.parametrize("size", [1, 2, 9])
def test_every_row_counts_once_however_the_set_is_cut(tmp_path: Path, model: Artifact, size: int):
    made = context(
        tmp_path / "run", model, HELD_OUT[:size], **{**EVAL, "max_steps": 1}, micro_batch_tokens=40
    )
    found = train(made)
    expected = plain_loss(tmp_path / "run/out-model", HELD_OUT[:size])
    assert found.figures["eval/loss"] == pytest.approx(expected, abs=2e-6)
    assert found.figures["eval/rows"] == size


def test_it_happens_when_it_is_asked_for_and_at_the_end(tmp_path: Path, model: Artifact):
    steps = {
        "end": ({}, [4]),
        "often": ({"eval_steps": 3}, [3, 4]),
        "start": ({"eval_on_start": True}, [0, 4]),
        "all": ({"eval_steps": 2, "eval_on_start": True}, [0, 2, 4]),
    }
    for name, (options, expected) in steps.items():
        made = context(tmp_path / name, model, HELD_OUT, **EVAL, **options)
        found = train(made)
        seen = evaluations(made)
        assert list(seen) == expected, name
        assert found.figures["eval/loss"] == seen[4]
        assert set(evaluations(made, "eval/token_accuracy")) == set(expected)
    assert seen[0] == pytest.approx(plain_loss(model.path, HELD_OUT), abs=2e-6)


def test_it_changes_nothing_of_the_training(tmp_path: Path):
    model = model_artifact(tmp_path / "model", attention_dropout=0.2)
    without = context_for(
        tmp_path / "without", "train.sft", model, completion_rows(), "prompt_completion", **EVAL
    )
    train(without)
    made = context(tmp_path / "with", model, HELD_OUT, **EVAL, eval_steps=1, eval_on_start=True)
    train(made)
    a, b = weights(tmp_path / "without/out-model"), weights(tmp_path / "with/out-model")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert made.losses == without.losses


def test_pairs_have_a_reference_of_their_own(tmp_path: Path, model: Artifact):
    # More rows than there are training rows, in the same places: neither set may see the other's reference.
    pairs = [{"prompt": f"p{i}", "chosen": "abc" * (1 + i), "rejected": "x"} for i in range(9)]
    made = context(
        tmp_path / "run",
        model,
        pairs,
        "train.dpo",
        **{**EVAL, "batch_size": 2},
        eval_steps=2,
        eval_on_start=True,
    )
    train(made)
    seen = evaluations(made)
    assert seen[0] == pytest.approx(math.log(2), abs=1e-5)
    assert seen[2] != pytest.approx(math.log(2), abs=1e-3)
    assert made.losses[0] == pytest.approx(math.log(2), abs=1e-5)


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path, model: Artifact, monkeypatch):
    from posttrain_plugins.training.step import Stepper

    plain = Stepper.evaluate

    def broken(self: Any, *rest: Any) -> Any:
        from dataclasses import replace

        return replace(plain(self, *rest), loss=math.nan, suspects=[3])

    monkeypatch.setattr(Stepper, "evaluate", broken)
    with pytest.raises(TrainingDiverged, match="the loss of the evaluation") as caught:
        train(context(tmp_path / "run", model, HELD_OUT, **EVAL, eval_steps=2))
    assert "rows 3 of port `eval`" in str(caught.value.found)


# The best one


def test_judging():
    best = Best("eval/loss", greater=False, patience=2, threshold=0.5)
    losses = [5.0, 4.0, 3.8, 3.9, 3.0, 3.0]
    assert [best.judge(step, {"eval/loss": loss}) for step, loss in enumerate(losses, 1)] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert (best.step, best.metrics, best.waited, best.exhausted) == (5, {"eval/loss": 3.0}, 1, False)
    other = Best("eval/x", greater=True, patience=1)
    assert [other.judge(step, {"eval/x": value}) for step, value in enumerate([1.0, 2.0, 2.0])] == [
        True,
        True,
        False,
    ]
    assert other.exhausted
    again = Best("eval/loss", greater=False, patience=2, threshold=0.5)
    again.restore(best.state())
    assert again == best


def test_the_best_weights_are_put_out(tmp_path: Path, model: Artifact):
    made = rising(tmp_path / "best", model, load_best_model_at_end=True, save_total_limit=1, save_steps=1)
    found = train(made)
    seen = evaluations(made)
    best = min(seen, key=seen.__getitem__)
    assert 1 <= best < 8
    assert found.figures["best_step"] == best
    assert found.figures["eval/loss"] == seen[best]
    assert f"8 steps with the weights of step {best} over" in found.summary
    train(rising(tmp_path / "short", model, max_steps=best))
    a, b = weights(tmp_path / "best/out-model"), weights(tmp_path / "short/out-model")
    assert all(torch.equal(a[name], b[name]) for name in a)
    kept = sorted(path.name for path in (tmp_path / "best/work/checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", "step-00000008"]


@pytest.mark.slow
@pytest.mark.parametrize(("save_steps", "stop"), [(0, 5), (1, 2), (3, 5)])
def test_the_best_survives_a_stop(tmp_path: Path, model: Artifact, save_steps: int, stop: int):
    options = {"load_best_model_at_end": True, "save_steps": save_steps, "save_total_limit": 1}
    expected = train(rising(tmp_path / "whole", model, **options))
    first = rising(tmp_path / "parts", model, **options)
    first.stop_at = stop
    with pytest.raises(Interrupted):
        train(first)
    found = train(rising(tmp_path / "parts", model, **options))
    assert (found.figures, found.summary, found.steps) == (expected.figures, expected.summary, expected.steps)
    a, b = weights(tmp_path / "whole/out-model"), weights(tmp_path / "parts/out-model")
    assert all(torch.equal(a[name], b[name]) for name in a)


def stopping_in_evaluation(made: Context, number: int) -> None:
    """Ask the stage to stop at the first micro-batch of its n-th evaluation."""
    begun: list[int] = []

    def hear(done: int, unit: str) -> None:
        if unit == "evaluation rows":
            begun.append(done)
            made.stop = made.stop or len(set(made.seen_metrics)) >= number

    made.on_progress = hear


@pytest.mark.parametrize(
    ("options", "number"),
    [({"load_best_model_at_end": True}, 1), ({}, 4), ({"early_stopping_patience": 1, "max_steps": 6}, 3)],
)
def test_a_stop_is_heard_within_an_evaluation_and_a_resume_makes_up_for_it(
    tmp_path: Path, model: Artifact, options: Mapping[str, Any], number: int
):
    given = {"max_steps": 4, "micro_batch_tokens": 8, **options}
    expected = train(whole := rising(tmp_path / "whole", model, **given))
    first = rising(tmp_path / "parts", model, **given)
    stopping_in_evaluation(first, number)
    with pytest.raises(Interrupted):
        train(first)
    assert len(evaluations(first)) == number - 1
    again = rising(tmp_path / "parts", model, **given)
    stopping_in_evaluation(again, 0)
    with pytest.raises(Interrupted):
        train(again)
    assert not evaluations(again) and again.losses == []
    found = train(last := rising(tmp_path / "parts", model, **given))
    assert (found.figures, found.summary, found.steps) == (expected.figures, expected.summary, expected.steps)
    assert {**evaluations(first), **evaluations(last)} == evaluations(whole)
    a, b = weights(tmp_path / "whole/out-model"), weights(tmp_path / "parts/out-model")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_evaluation_says_how_far_it_is(tmp_path: Path, model: Artifact):
    made = context(tmp_path / "run", model, HELD_OUT, **EVAL, micro_batch_tokens=40)
    train(made)
    told = [(done, total) for done, total, unit in made.seen_progress if unit == "evaluation rows"]
    assert len(told) > 2 and told == sorted(told) and told[-1] == (len(HELD_OUT), len(HELD_OUT))


def test_it_stops_early_and_knows_it_on_resume(tmp_path: Path, model: Artifact, monkeypatch):
    options = {"early_stopping_patience": 2, "load_best_model_at_end": True, "max_steps": 30}
    made = rising(tmp_path / "whole", model, **options)
    expected = train(made)
    seen = evaluations(made)
    best = min(seen, key=seen.__getitem__)
    assert expected.steps == max(seen) == best + 2
    assert "stopped early" in expected.summary

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("posttrain_plugins.training.stage.save_policy", die)
        with pytest.raises(Killed):
            train(rising(tmp_path / "parts", model, **options))
    again = rising(tmp_path / "parts", model, **options)
    found = train(again)
    assert again.losses == [], "no step is made up after the stop"
    assert (found.figures, found.steps, found.summary) == (
        expected.figures,
        expected.steps,
        expected.summary,
    )


def test_without_the_best_weights_the_last_ones_are_put_out(tmp_path: Path, model: Artifact):
    made = rising(tmp_path / "run", model, early_stopping_patience=2, max_steps=30)
    found = train(made)
    assert found.figures["eval/loss"] == evaluations(made)[found.steps]
    assert found.figures["best_step"] == found.steps - 2
    assert plain_loss(tmp_path / "run/out-model", OTHER) == pytest.approx(
        found.figures["eval/loss"], abs=2e-6
    )


@pytest.mark.slow
def test_a_checkpoint_whose_best_one_is_damaged_is_skipped(tmp_path: Path, model: Artifact):
    options = {"load_best_model_at_end": True, "save_steps": 1, "save_total_limit": 2}
    whole = rising(tmp_path / "whole", model, **options)
    expected = train(whole)
    best = int(expected.figures["best_step"])
    first = rising(tmp_path / "parts", model, **options)
    first.stop_at = best + 1
    with pytest.raises(Interrupted):
        train(first)
    (tmp_path / f"parts/work/checkpoints/step-{best:08d}/weights.safetensors").write_bytes(b"")
    second = rising(tmp_path / "parts", model, **options)
    found = train(second)
    assert any("which it needs" in note for note in second.notes)
    assert found.figures == expected.figures


def test_a_metric_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path, model: Artifact):
    options = {
        "metric_for_best_model": "eval/bleu",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    with pytest.raises(SpecError, match="no such metric") as caught:
        train(context(tmp_path / "run", model, HELD_OUT, **EVAL, eval_steps=1, **options))
    assert caught.value.found == "eval/bleu"
    assert "eval/loss, eval/token_accuracy" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping_patience": 2}, "needs eval_steps"),
        ({"load_best_model_at_end": True}, "needs eval_steps"),
        ({"early_stopping_threshold": 0.1}, "ignored without early_stopping_patience"),
        ({"metric_for_best_model": "eval/entropy"}, "ignored without load_best_model_at_end"),
        ({"greater_is_better": True}, "ignored without load_best_model_at_end"),
        ({"metric_for_best_model": "loss"}, "did you mean eval/loss"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        SftOptions(**options)


@pytest.mark.parametrize("uses", ["train.sft", "train.dpo"])
def test_the_plan_finds_evaluations_of_nothing(tmp_path: Path, model: Artifact, uses: str):
    stage = catalogue().stage(uses)
    data = dataset_artifact(
        tmp_path / "data", completion_rows() if uses == "train.sft" else preference_rows(), FORMATS[uses]
    )
    inputs = {
        "model": [Input("base", Kind.MODEL, model.facts, model)],
        "data": [Input("rows", Kind.DATASET, data.facts, data)],
    }
    config = configured(stage, eval_steps=5, early_stopping_patience=1)
    (finding,) = stage.check(config, inputs)
    assert (finding.port, finding.certainty) == ("eval", Certainty.VERIFIED)
    assert "eval_steps, early_stopping_patience would be ignored" in finding.message
    held_out = {**inputs, "eval": [Input("held out", Kind.DATASET, data.facts, data)]}
    assert list(stage.check(config, held_out)) == []
    assert {port.name: (port.optional, port.training) for port in stage.inputs}["eval"] == (True, False)
    weighed = configured(stage, weight_column="w")
    assert {finding.port for finding in stage.check(weighed, held_out)} == {"data", "eval"}
