"""A reference that follows the policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import advance, logits, optimizer_of, trained_parameters
from helpers.contexts import FakeContext, catalogue, configured
from helpers.stepping import examples, stepper
from helpers.training import context_for, dataset_artifact, model_artifact, preference_rows, train, weights
from pydantic import ValidationError

from posttrain.artifacts.kinds import FACTS_OF, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Level
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.trainers.dpo import DpoOptions
from posttrain_plugins.trainers.kto import KtoOptions
from posttrain_plugins.training.batches import DataOrder
from posttrain_plugins.training.moving import _visited
from posttrain_plugins.training.starting import StartingPolicy

LN2 = math.log(2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("base"), hidden_size=32)


def dpo(directory: Path, base: Artifact, **options: Any) -> FakeContext:
    chosen = {"max_steps": 7, "batch_size": 4, "learning_rate": 3e-3, **options}
    return context_for(directory, "train.dpo", base, preference_rows(10), "preference", **chosen)


def test_what_is_kept_follows_by_hand(base: Artifact):
    model = load_model(base.path, "float32").requires_grad_(True)
    start = {name: tensor.detach().clone() for name, tensor in trained_parameters(model).items()}
    reference = StartingPolicy.kept(model)
    optimizer = optimizer_of(model)
    advance(model, optimizer)
    first = {name: tensor.detach().clone() for name, tensor in trained_parameters(model).items()}
    reference.follow(0.6)
    advance(model, optimizer)
    second = {name: tensor.detach().clone() for name, tensor in trained_parameters(model).items()}
    reference.follow(0.5)
    for name, tensor in reference.values.items():
        expected = 0.5 * second[name] + 0.5 * (0.6 * first[name] + 0.4 * start[name])
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
    before = logits(model)
    with reference.active():
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def test_a_reference_that_catches_up_makes_the_policy_its_own(tmp_path: Path, base: Artifact):
    """With α = 1 after every step the loss is ln 2 in all of them; with one that stays it falls."""
    moving = dpo(tmp_path / "moving", base, reference_sync={"steps": 1, "alpha": 1.0})
    train(moving)
    assert moving.losses == pytest.approx([LN2] * 7, abs=1e-6)
    assert any(unit == "reference rows" for _, _, unit in moving.seen_progress)
    staying = dpo(tmp_path / "staying", base)
    train(staying)
    assert staying.losses[-1] < LN2 - 1e-3


def test_until_it_moves_it_is_the_starting_policy(tmp_path: Path, base: Artifact):
    staying = dpo(tmp_path / "staying", base)
    train(staying)
    moving = dpo(tmp_path / "moving", base, reference_sync={"steps": 4, "alpha": 0.6})
    train(moving)
    assert moving.losses[:4] == pytest.approx(staying.losses[:4], abs=1e-6)
    assert moving.losses[4] > staying.losses[4] + 1e-4


SYNC = {"steps": 3, "alpha": 0.6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: Artifact) -> dict[str, torch.Tensor]:
    """The weights of a training that was not interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    train(dpo(directory, base, reference_sync=SYNC))
    return weights(directory / "out-model")


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_resume_is_exact(tmp_path: Path, base: Artifact, whole: dict[str, torch.Tensor], stop: int):
    first = dpo(tmp_path / "parts", base, reference_sync=SYNC)
    first.stop_at = stop
    with pytest.raises(Interrupted):
        train(first)
    train(dpo(tmp_path / "parts", base, reference_sync=SYNC))
    resumed = weights(tmp_path / "parts" / "out-model")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_evaluations_see_the_reference_as_it_is(tmp_path: Path, base: Artifact):
    context = dpo(
        tmp_path, base, reference_sync={"steps": 2, "alpha": 1.0}, eval_steps=2, max_steps=5, logging_steps=1
    )
    context.inputs = {
        **context.inputs,
        "eval": [dataset_artifact(tmp_path / "eval", preference_rows(14)[10:], "preference")],
    }
    train(context)
    found = [context.seen_metrics[step]["eval/loss"] for step in (2, 4, 5)]
    # After steps 2 and 4 the reference is the policy; step 5 takes it away again.
    assert found[:2] == pytest.approx([LN2] * 2, abs=1e-6)
    assert abs(found[2] - LN2) > 1e-5


def test_a_stop_is_heard_where_the_reference_of_an_evaluation_is_scored(tmp_path: Path, base: Artifact):
    context = dpo(
        tmp_path,
        base,
        reference_sync={"steps": 3, "alpha": 1.0},
        eval_steps=2,
        max_steps=5,
        micro_batch_tokens=8,
    )
    held_out = dataset_artifact(tmp_path / "eval", preference_rows(14)[10:], "preference")
    context.inputs = {**context.inputs, "eval": [held_out]}

    def hear(done: int, unit: str) -> None:
        context.stop = context.stop or (unit == "reference rows" and done > 10)

    context.on_progress = hear
    with pytest.raises(Interrupted):
        train(context)
    scored = [(done, total) for done, total, unit in context.seen_progress if unit == "reference rows"]
    assert scored[-1][0] > 10 and {total for _, total in scored} == {14} and not context.losses


def test_a_stop_while_the_next_rows_are_scored_keeps_the_step(
    tmp_path: Path, base: Artifact, whole: dict[str, torch.Tensor]
):
    first = dpo(tmp_path / "parts", base, reference_sync=SYNC)

    def hear(done: int, unit: str) -> None:
        first.stop = first.stop or (unit == "reference rows" and 2 in first.seen_metrics)

    first.on_progress = hear
    with pytest.raises(Interrupted, match="step 3 of 7"):
        train(first)
    train(dpo(tmp_path / "parts", base, reference_sync=SYNC))
    resumed = weights(tmp_path / "parts" / "out-model")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_is_put_out_is_judged_by_the_reference_of_the_last_move(tmp_path: Path, base: Artifact):
    """Also where a training had come to its end, and only its result was not saved."""

    def figures() -> dict[str, float]:
        options = {"reference_sync": {"steps": 2, "alpha": 1.0}, "max_steps": 4, "save_steps": 2}
        context = dpo(tmp_path, base, callbacks=[{"name": "bema", "every": 1}], **options)
        held_out = dataset_artifact(tmp_path / "eval", preference_rows(14)[10:], "preference")
        context.inputs = {**context.inputs, "eval": [held_out]}
        return dict(train(context).figures)

    first = figures()
    again = figures()
    assert again["eval/loss"] == pytest.approx(first["eval/loss"], abs=1e-7)
    # Without a reference rewards would be whole log-probs, far below 0.
    assert abs(again["eval/rewards/chosen"]) < 1 and again["eval/loss"] != pytest.approx(LN2, abs=1e-6)


def test_a_loss_is_not_called_before_its_reference_is_known():
    made = stepper("train.dpo", "sigmoid")
    made.reference = None
    with pytest.raises(AssertionError, match="the reference is scored before"):
        made.backward(examples("train.dpo"))


def test_kto_too(tmp_path: Path, base: Artifact):
    rows = [
        {"prompt": f"q{i}", "completion": ("yes" if i % 2 else "no") * (1 + i % 3), "label": bool(i % 2)}
        for i in range(8)
    ]
    runs = {}
    for name, sync in {"staying": None, "moving": {"steps": 1, "alpha": 1.0}}.items():
        context = context_for(
            tmp_path / name,
            "train.kto",
            base,
            rows,
            "unpaired_preference",
            max_steps=4,
            batch_size=8,
            learning_rate=3e-3,
            reference_sync=sync,
        )
        train(context)
        runs[name] = context.losses
    assert runs["moving"] == pytest.approx([0.5] * 4, abs=1e-5)
    assert runs["staying"][-1] < 0.499


def test_a_reference_that_never_moves_is_told(tmp_path: Path, base: Artifact):
    context = dpo(tmp_path, base, reference_sync={}, max_steps=1)
    train(context)
    assert any("never moves" in note for note in context.warnings)


def test_a_loss_without_a_reference_has_none_to_move(tmp_path: Path, base: Artifact):
    with pytest.raises(StageError, match="reference_sync would be ignored"):
        train(dpo(tmp_path, base, reference_sync={"steps": 1}, loss="simpo"))


@pytest.mark.parametrize("options", [DpoOptions, KtoOptions])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora": {}}, "needs all weights trained"),
        ({"backend": {"name": "fsdp2"}}, "needs a backend that keeps all weights"),
        ({"reference_sync": {"alpha": 0}}, "greater than 0"),
        ({"reference_sync": {"steps": 0}}, "greater than or equal to 1"),
        ({"reference_sync": {"alpha": 1.5}}, "less than or equal to 1"),
    ],
)
def test_what_it_does_not_go_together_with(options: Any, given: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        options(**{"reference_sync": {"steps": 4}, **given})


@pytest.mark.parametrize("uses", ["train.dpo", "train.kto"])
def test_a_plan_refuses_adapters_and_log_probs(uses: str):
    stage = catalogue().stage(uses)

    def check(kind: Kind, loss: str | None = None, **ports: Kind) -> list[str]:
        inputs = {name: [Input(f"some.{name}", each, FACTS_OF[each]())] for name, each in ports.items()}
        inputs |= {
            "model": [Input("base.model", kind, FACTS_OF[kind]())],
            "data": [Input("rows.data", Kind.DATASET, FACTS_OF[Kind.DATASET]())],
        }
        config = configured(stage, reference_sync={"steps": 4}, **({} if loss is None else {"loss": loss}))
        return [each.message for each in stage.check(config, inputs) if each.level is Level.ERROR]

    assert check(Kind.MODEL) == []
    (adapter,) = check(Kind.ADAPTER)
    assert "base.model is an adapter" in adapter
    assert any(
        "some.log_probs would be ignored" in each for each in check(Kind.MODEL, log_probs=Kind.LOG_PROBS)
    )
    if uses == "train.dpo":
        (ignored,) = check(Kind.MODEL, "simpo")
        assert ignored == "reference_sync would be ignored: no loss compares with a reference"


def test_a_moving_reference_is_in_the_estimate():
    stage = catalogue().stage("train.dpo")
    facts = FACTS_OF[Kind.MODEL](parameters=1000, layers=2, width=8, embeddings=32, context=64)
    inputs = {"model": [Input("base.model", Kind.MODEL, facts)]}
    staying, moving = (
        stage.estimate(configured(stage, **given), inputs) for given in ({}, {"reference_sync": {"steps": 4}})
    )
    assert moving.memory_bytes - staying.memory_bytes == 4 * 1000


def test_the_rows_until_the_next_move():
    order = DataOrder(10, 4, seed=0, shuffle=True)
    first, second = order.epoch(0), order.epoch(1)
    assert _visited(order, 0, 2) == sorted(first[0] + first[1])
    assert _visited(order, 2, 4) == sorted({*first[2], *second[0]})
    assert _visited(order, 4, 5) == sorted(second[1])
    assert _visited(order, 0, 6) == list(range(10))
