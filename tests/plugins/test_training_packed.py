"""A step of packed rows is the step of what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.stepping import assert_same, examples, gradient, stepper
from helpers.training import ROWS, dataset_artifact, model_artifact, train, weights

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import load_target
from posttrain_plugins.data.tokens.token_rows import TokenRows
from posttrain_plugins.training.batches import Budget, fullness
from posttrain_plugins.training.layouts import LAYOUTS

KINDS = [("train.sft", "messages", "padded"), ("train.sft", "messages", "packed"),
         ("train.dpo", "preference", "packed"), ("train.dpo", "preference", "shared_prefix")]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model") / "model", attn_implementation="sdpa")


def ran(directory: Path, uses: str, inputs: Mapping[str, Artifact], **options: Any) -> FakeContext:
    stage = catalogue().stage(uses)
    given = {port: [artifact] for port, artifact in inputs.items()}
    context = FakeContext(directory, stage, configured(stage, **options), given)
    if uses.startswith("train."):
        train(context)
    else:
        load_target(stage.target)(context)
    return context


def tokens(directory: Path, model: Artifact, format: str, rows: Sequence[Mapping[str, Any]]) -> Artifact:
    weighted = [{**row, "w": 1 + number % 3} for number, row in enumerate(rows)]
    data = dataset_artifact(directory / "rows", weighted, format)
    inputs = {"data": data, "model": model}
    return ran(directory / "made", "data.tokenize", inputs, weight_column="w").result("data")


@pytest.mark.parametrize(("uses", "format", "layout"), KINDS)
def test_a_step_of_packed_rows_learns_what_a_step_of_their_documents_does(
    tmp_path: Path, model: Artifact, uses: str, format: str, layout: str
):
    apart = tokens(tmp_path, model, format, ROWS[format](9))
    together = ran(tmp_path / "pack", "data.pack", {"data": apart}, length=110).result("data")
    assert 1 < together.facts.rows < 9
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "layout": layout}
    found = []
    for data in (apart, together):
        size = {"batch_size": data.facts.rows, "micro_batch_tokens": 120}
        inputs = {"model": model, "data": data}
        found.append(ran(tmp_path / f"train-{data.facts.rows}", uses, inputs, **options, **size))
    one, other = found
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    before = weights(model.path)
    updates = [[weights(c.output("model"))[name] - before[name] for name in before] for c in found]
    assert_same(updates[1], updates[0])
    assert any(bool(update.abs().max() > 1e-5) for update in updates[0])


def test_batch_size_counts_packed_rows(tmp_path: Path, model: Artifact):
    apart = tokens(tmp_path, model, "text", ROWS["text"](10))
    together = ran(tmp_path / "pack", "data.pack", {"data": apart}, length=60).result("data")
    rows = together.facts.rows
    assert rows is not None and rows < 10
    context = ran(
        tmp_path / "train",
        "train.sft",
        {"model": model, "data": together},
        num_train_epochs=1,
        batch_size=2,
        logging_steps=1,
    )
    assert len(context.losses) == -(-rows // 2)


def test_packed_rows_are_evaluated_too(tmp_path: Path, model: Artifact):
    apart = tokens(tmp_path, model, "text", ROWS["text"](6))
    together = ran(tmp_path / "pack", "data.pack", {"data": apart}, length=60).result("data")
    losses = []
    for name, data in {"apart": apart, "together": together}.items():
        inputs = {"model": model, "data": apart, "eval": data}
        context = ran(tmp_path / name, "train.sft", inputs, max_steps=1, eval_on_start=True)
        losses.append(context.seen_metrics[0]["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("uses", ["train.sft", "train.dpo"])
def test_what_shares_a_micro_batch_does_not_change_the_gradient(uses: str):
    """Best-fit puts other examples together than one after the other would."""
    loss = {"train.sft": "nll", "train.dpo": "sigmoid"}[uses]
    rows = examples(uses, 9)
    whole = gradient(stepper(uses, loss, layout="packed"), rows)
    longest = max(each.size for each in rows)
    cut = gradient(stepper(uses, loss, layout="packed", tokens=longest + 5), rows)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert_same(cut[2], whole[2])


def test_fullness_is_the_share_of_places_with_a_token():
    rows = examples("train.sft", 6)
    places = max(each.size for each in rows) * 6
    budget = Budget(places)
    assert fullness([rows], LAYOUTS["padded"], budget) == pytest.approx(sum(r.size for r in rows) / places)
    assert fullness([rows], LAYOUTS["packed"], budget) == 1.0


def test_a_row_of_split_text_learns_every_piece_once(tmp_path: Path, model: Artifact):
    apart = tokens(tmp_path, model, "text", [{"text": "ab" * 20}, {"text": "cd" * 3}])
    together = ran(tmp_path / "pack", "data.pack", {"data": apart}, strategy="split", length=16).result(
        "data"
    )
    pieces = [len(e.sequences[0].tokens) for row in TokenRows(together.path).examples() for e in row]
    assert sum(pieces) == sum(TokenRows(apart.path).lengths) and max(pieces) <= 16
    context = ran(
        tmp_path / "train", "train.sft", {"model": model, "data": together}, max_steps=1, batch_size=10
    )
    assert torch.isfinite(torch.tensor(context.losses)).all()
