"""What training loops of other projects got silently wrong, each kind with a value worked out by hand or a property."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.losses import EntropyBonus
from helpers.stepping import ALL, assert_same, encoder, examples, gradient, stepper
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import LossOutput, Term, TokenBatch
from posttrain.contracts.reduction import MEAN_OF_SEQUENCE_MEANS
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.memory import saved_bytes

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("tokens", [1, 60, 150, 8192])
def test_a_preference_loss_starts_at_ln_2_with_the_same_gradient_however_the_step_is_cut(
    tmp_path: Path, model: Artifact, tokens: int
):
    """A loss that is divided by the wrong count grows with the number of micro-batches."""
    context = context_for(
        tmp_path,
        "train.dpo",
        model,
        preference_rows(8),
        "preference",
        max_steps=1,
        batch_size=8,
        micro_batch_tokens=tokens,
    )
    train(context)
    metrics = context.seen_metrics[1]
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    whole = context_for(
        tmp_path / "whole", "train.dpo", model, preference_rows(8), "preference", max_steps=1, batch_size=8
    )
    train(whole)
    assert metrics["grad_norm"] == pytest.approx(whole.seen_metrics[1]["grad_norm"], rel=1e-5)


class _Only(EntropyBonus):
    """The entropy alone."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
        return LossOutput([Term(-batch.entropy * batch.weight, MEAN_OF_SEQUENCE_MEANS, self.coefficient)])


def test_a_bonus_reaches_the_gradient_in_proportion_to_its_coefficient():
    """A bonus or penalty that is computed without gradient shows in the logs and does nothing."""
    rows = examples("train.sft")
    once = gradient(stepper("train.sft", "entropy", plugin=_Only(1.0)), rows)[2]
    twice = gradient(stepper("train.sft", "entropy", plugin=_Only(2.0)), rows)[2]
    assert max(float(each.abs().max()) for each in once) > 1e-4
    assert_same(twice, [2 * each for each in once])


@pytest.mark.parametrize(("uses", "loss"), ALL)
def test_padding_and_cut_change_no_metric(uses: str, loss: str):
    """An average over a padded tensor changes with the length of the longest row."""
    rows = examples(uses)
    one = stepper(uses, loss).evaluate(rows)
    for layout in LAYOUTS:
        other = stepper(uses, loss, 70, layout).evaluate(rows)
        assert other.metrics == pytest.approx(dict(one.metrics), rel=1e-4, abs=1e-5), layout
        assert (other.loss, other.surprise) == pytest.approx((one.loss, one.surprise), rel=1e-5), layout


@pytest.mark.parametrize("uses", ["train.sft", "train.dpo"])
@EVERY_LAYOUT
def test_a_layout_loses_and_invents_no_token_and_no_label(uses: str, layout: str):
    """Packing that cuts to a fixed length drops the tails, or starts rows in the middle of an answer."""
    rows = examples(uses)
    expected = Counter(
        (each.tokens[at - 1], each.tokens[at])
        for row in rows
        for each in row.sequences
        for at in range(1, len(each.tokens))
        if each.supervised[at]
    )
    micro = LAYOUTS[layout].arrange(rows, 0, "cpu")
    before = micro.tokens.flatten()[micro.selected].tolist()
    assert Counter(zip(before, micro.targets.tolist(), strict=True)) == expected
    positions = [len(row.sequences[number].tokens) for row in rows for number in range(len(row.sequences))]
    assert micro.positions.max() == max(positions) - 1


@EVERY_LAYOUT
def test_an_end_token_that_is_the_pad_token_is_learned(layout: str):
    """Labels that are masked wherever the token is the pad token lose every end of turn."""
    one = Example(0, (TokenSequence([4, 5, 2], [False, True, True], "completion"),))
    two = Example(1, (TokenSequence([4, 5, 6, 7, 2], [False, True, True, True, True], "completion"),))
    micro = LAYOUTS[layout].arrange([one, two], 2, "cpu")
    assert micro.targets.tolist() == [5, 2, 5, 6, 7, 2]
    assert int(micro.real.sum()) == 8


@pytest.mark.parametrize(("uses", "loss"), [("train.sft", "nll"), ("train.dpo", "sigmoid")])
@EVERY_LAYOUT
def test_a_micro_batch_without_supervised_tokens_adds_nothing(uses: str, loss: str, layout: str):
    """The mean over no tokens is not a number, and one such micro-batch would spoil the step."""
    rows = examples(uses)
    silent = [
        Example(
            50 + number,
            tuple(
                TokenSequence([4, 5, 6, 7 + at], [False] * 4, each.role)
                for at, each in enumerate(rows[0].sequences)
            ),
            weight=0.0,
        )
        for number in range(2)
    ]
    made = stepper(uses, loss, 1, layout)
    result = made.backward([*rows, *silent])
    assert math.isfinite(result.loss)
    counted = len(rows) / (len(rows) + 2) if uses == "train.dpo" else 1.0
    _, _, expected = gradient(stepper(uses, loss), rows)
    assert_same([p.grad for p in made.model.parameters()], [counted * each for each in expected])


@EVERY_LAYOUT
def test_memory_does_not_grow_with_the_vocabulary_times_the_prompt(layout: str):
    """Logits of a prompt that nobody learns from would take most of the memory."""
    answer = 5
    sequence = TokenSequence([4] * 200 + [5] * answer, [False] * 200 + [True] * answer, "completion")
    small, large = (
        stepper("train.sft", "nll", layout=layout, model=_model(vocabulary)) for vocabulary in (500, 5000)
    )
    taken = [
        saved_bytes(
            lambda made=made: made.score(made.layout.arrange([Example(0, (sequence,))], 0, "cpu")), made.model
        )
        for made in (small, large)
    ]
    assert taken[1] - taken[0] <= 4 * 4500 * answer * 1.1


def _model(vocabulary: int) -> Any:
    from helpers.models import tiny_llama

    assert vocabulary > encoder().vocabulary
    return tiny_llama(vocabulary, attn_implementation="sdpa", max_position_embeddings=256).train()


def test_weights_that_do_not_move_far_enough_for_bfloat16_still_move():
    """1 − 0.001 is 1 in bfloat16: weights that are kept in it stand still at small learning rates."""
    assert (torch.tensor(1.0, dtype=torch.bfloat16) - torch.tensor(1e-3, dtype=torch.bfloat16)) == 1.0
    made = stepper("train.sft", "nll")
    made.precision = torch.bfloat16
    before = [p.detach().clone() for p in made.model.parameters()]
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(50):
        made.backward(examples("train.sft"))
        optimizer.step()
        optimizer.zero_grad()
    moved = sum(int((p != q).sum()) for p, q in zip(made.model.parameters(), before, strict=True))
    seen = sum(p.numel() for p in before)
    assert moved > 0.9 * seen
