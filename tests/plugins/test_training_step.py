from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.models import char_tokenizer, tiny_llama
from helpers.training import ROWS, TRAININGS, format_of

from posttrain.contracts.component import Component, NoOptions
from posttrain.contracts.loss import LossOutput, PreferenceBatch, Reduction, Term, TokenBatch
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, Scores, TokenSequence
from posttrain.errors import StageError
from posttrain_plugins.losses.sigmoid import Sigmoid
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.training import head as heads
from posttrain_plugins.training.head import full_logits, selected_logits
from posttrain_plugins.training.step import Averages, Stepper


@lru_cache(maxsize=1)
def encoder() -> Encoder:
    with TemporaryDirectory() as directory:
        char_tokenizer(Path(directory))
        return Encoder.open(Path(directory))


def examples(uses: str, count: int = 7) -> list[Example]:
    """Examples of ragged lengths and weights, made by the trainer itself from rows of its format."""
    format, trainer = format_of(uses), catalogue().stage(uses)
    made = [trainer.example(row, i, encoder(), format) for i, row in enumerate(ROWS[format](count))]
    return [replace(each, weight=0.5 + each.row % 3) for each in made]


def stepper(uses: str, loss: str, budget: int = 10_000, **more: Any) -> Stepper:
    plugin = more.pop("plugin", None) or catalogue().make(Group.LOSS, loss)
    trainer = catalogue().stage(uses)
    made = Stepper(
        tiny_llama(encoder().vocabulary).train(),
        trainer,
        Component(loss, plugin, plugin.config()),
        0,
        budget,
        **more,
    )
    if plugin.needs_reference:
        width = len(examples(uses, 1)[0].sequences)
        made.reference = {row: -torch.arange(1.0, width + 1) * (row + 9) for row in range(100)}
    return made


def gradient(made: Stepper, rows: Sequence[Example]) -> tuple[float, dict[str, float], list[torch.Tensor]]:
    made.model.zero_grad()
    result = made.backward(rows)
    return result.loss, dict(result.metrics), [p.grad.clone() for p in made.model.parameters()]


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    largest = max(float(tensor.abs().max()) for tensor in expected)
    gap = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    assert gap <= 2e-6 * largest


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
@pytest.mark.parametrize("budget", [1, 60, 150])
def test_cutting_the_step_changes_neither_loss_nor_metrics_nor_gradient(uses: str, loss: str, budget: int):
    rows = examples(uses)
    whole, metrics, expected = gradient(stepper(uses, loss), rows)
    cut, cut_metrics, found = gradient(stepper(uses, loss, budget), rows)
    assert cut == pytest.approx(whole, rel=1e-6)
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_same(found, expected)


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
@pytest.mark.parametrize("head", [selected_logits, full_logits])
def test_bounding_the_logits_changes_no_gradient(
    monkeypatch: pytest.MonkeyPatch, uses: str, loss: str, head: Any
):
    rows = examples(uses)
    _, _, expected = gradient(stepper(uses, loss, head=head), rows)
    made, held = stepper(uses, loss, head=head), []
    made.model.lm_head.register_forward_hook(lambda module, inputs, output: held.append(output.numel()))
    largest = max(sum(len(each.tokens) for each in row.sequences) for row in rows)
    limit = 2 * largest * encoder().vocabulary
    monkeypatch.setattr(heads, "LOGITS", limit)
    assert_same(gradient(made, rows)[2], expected)
    assert len(held) > 1 and max(held) <= limit


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
def test_logits_that_fit_are_not_cut(uses: str, loss: str):
    made = stepper(uses, loss)
    assert len(list(made.micro_batches(examples(uses)))) == 1


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
def test_masked_positions_have_no_gradient(uses: str, loss: str):
    made, seen = stepper(uses, loss, head=full_logits), []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    made.model.lm_head.register_forward_hook(keep)
    rows = examples(uses)
    made.backward(rows)
    for logits, micro in zip(seen, made.micro_batches(rows), strict=True):
        moved = logits.grad.abs().sum(-1) > 0
        assert not bool(moved[~micro.predicting].any())
        assert bool(moved[micro.predicting].any())


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
def test_the_order_of_rows_changes_nothing(uses: str, loss: str):
    rows = examples(uses)
    _, _, expected = gradient(stepper(uses, loss), rows)
    _, _, found = gradient(stepper(uses, loss), rows[::-1])
    assert_same(found, expected)


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
def test_padding_changes_nothing(uses: str, loss: str):
    rows = examples(uses)
    _, _, expected = gradient(stepper(uses, loss), rows)
    other = stepper(uses, loss)
    other.pad = 17
    assert_same(gradient(other, rows)[2], expected)
    lengthened = [replace(row, sequences=tuple(_with_tail(each) for each in row.sequences)) for row in rows]
    assert_same(gradient(stepper(uses, loss), lengthened)[2], expected)


def _with_tail(each: TokenSequence) -> TokenSequence:
    return TokenSequence([*each.tokens, 8, 8, 8], [*each.supervised, False, False, False], each.role)


@pytest.mark.parametrize(("uses", "loss"), TRAININGS)
def test_the_fast_head_has_the_gradient_of_the_plain_one(uses: str, loss: str):
    rows = examples(uses)
    _, _, expected = gradient(stepper(uses, loss, head=full_logits), rows)
    assert_same(gradient(stepper(uses, loss, head=selected_logits), rows)[2], expected)


def test_the_token_mean_is_taken_over_the_whole_step():
    """Against one sequence at a time through plain logits, divided once at the end."""
    rows = examples("train.sft")
    made = stepper("train.sft", "nll", budget=60)
    loss, _, found = gradient(made, rows)
    made.model.zero_grad()
    total, tokens = torch.zeros(()), 0
    for row in rows:
        (each,) = row.sequences
        logp = made.model(torch.tensor([each.tokens])).logits[0].log_softmax(-1)
        kept = [i for i in range(1, len(each.tokens)) if each.supervised[i]]
        total = total - row.weight * sum(logp[i - 1, each.tokens[i]] for i in kept)
        tokens += len(kept)
    mean = total / tokens
    mean.backward()
    assert loss == pytest.approx(mean.item(), rel=1e-6)
    assert_same(found, [p.grad for p in made.model.parameters()])


class Values:
    """A loss with fixed values by token, so that the reduction can be worked out by hand."""

    config = NoOptions
    needs_reference = False

    def __init__(self, reduction: Reduction, weight: float = 1.0) -> None:
        self.reduction, self.weight = reduction, weight

    def __call__(self, batch: TokenBatch, config: Any) -> LossOutput:
        values = batch.logp * 0 + batch.example.new_tensor([1.0, 3.0, 6.0])[: len(batch.logp)]
        if self.reduction is Reduction.SEQUENCE_MEAN:
            values = values.new_zeros(len(batch.weight.unique())).index_add(0, batch.example, values)
        return LossOutput([Term(values, self.reduction, self.weight)], {"value": values.detach()})


def two_rows() -> list[Example]:
    """Two supervised tokens and one: losses 1 and 3, and 6 when they are in one micro-batch."""
    return [
        Example(0, (TokenSequence([4, 5, 6], [False, True, True], "completion"),)),
        Example(1, (TokenSequence([4, 7], [False, True], "completion"),), weight=2.0),
    ]


@pytest.mark.parametrize(
    ("reduction", "weight", "expected"),
    [
        (Reduction.TOKEN_MEAN, 1.0, 10 / 3),
        (Reduction.TOKEN_MEAN, 0.5, 5 / 3),
        (Reduction.SEQUENCE_MEAN, 1.0, 5.0),
    ],
)
def test_reductions_worked_out_by_hand(reduction: Reduction, weight: float, expected: float):
    made = stepper("train.sft", "values", plugin=Values(reduction, weight))
    assert made.backward(two_rows()).loss == pytest.approx(expected)


def test_terms_add_up():
    class Two(Values):
        def __call__(self, batch: TokenBatch, config: Any) -> LossOutput:
            first = super().__call__(batch, config).terms[0]
            return LossOutput([first, Term(first.values, Reduction.TOKEN_MEAN, 0.1)])

    made = stepper("train.sft", "two", plugin=Two(Reduction.TOKEN_MEAN))
    assert made.backward(two_rows()).loss == pytest.approx(11 / 3)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda logp: [], "no terms"),
        (lambda logp: [Term(logp.detach(), Reduction.TOKEN_MEAN)], "no gradient"),
        (lambda logp: [Term(logp.sum(), Reduction.TOKEN_MEAN)], "do not fit its reduction"),
        (lambda logp: [Term(logp[None], Reduction.TOKEN_MEAN)], "do not fit its reduction"),
        (lambda logp: [Term(logp, Reduction.SEQUENCE_MEAN)], "do not fit its reduction"),
    ],
)
def test_a_wrong_loss_is_named(terms: Any, message: str):
    class Wrong(Values):
        def __call__(self, batch: TokenBatch, config: Any) -> LossOutput:
            return LossOutput(terms(batch.logp))

    with pytest.raises(StageError, match=message) as caught:
        stepper("train.sft", "wrong", plugin=Wrong(Reduction.TOKEN_MEAN)).backward(two_rows())
    assert "loss `wrong`" in caught.value.where


def test_averages_leave_out_what_is_not_finite():
    averages = Averages()
    averages.add({"a": torch.tensor([0.2, math.nan]), "b": torch.tensor([math.nan])})
    averages.add({"a": torch.tensor([0.6])})
    assert averages.means() == {"a": pytest.approx(0.4)}


def test_a_pair_stays_in_one_micro_batch_and_finds_its_own_reference():
    seen: list[PreferenceBatch] = []

    class Spy(Sigmoid):
        def __call__(self, batch: PreferenceBatch, config: Any) -> LossOutput:
            seen.append(batch)
            return super().__call__(batch, config)

    made = stepper("train.dpo", "spy", budget=1, plugin=Spy())
    made.backward(examples("train.dpo", 3))
    assert [len(batch.chosen) for batch in seen] == [1, 1, 1]
    references = sorted((-float(batch.reference_chosen), -float(batch.reference_rejected)) for batch in seen)
    assert references == [(9.0, 18.0), (10.0, 20.0), (11.0, 22.0)]


def test_the_gap_to_the_reference_is_the_largest_by_token():
    made = stepper("train.dpo", "sigmoid")
    rows = examples("train.dpo", 2)
    with torch.no_grad():
        made.reference = {
            row: made.score(micro).totals(made.score(micro).logp)[i]
            for micro in made.micro_batches(rows)
            for i, row in enumerate(each.row for each in micro.examples)
        }
    assert made.backward(rows).gap < 1e-6
    made.reference[1] = made.reference[1] + torch.tensor([0.0, 3.0])
    tokens = rows[1].sequences[1].predicted
    assert made.backward(rows).gap == pytest.approx(3.0 / tokens, rel=1e-4)


def test_totals_group_sequences_by_example():
    rows = examples("train.dpo", 2)
    scores = Scores(
        examples=rows,
        logp=torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]),
        entropy=torch.zeros(5),
        top1=torch.zeros(5, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 1, 2, 3]),
        weight=torch.ones(2),
    )
    assert scores.totals(scores.logp).tolist() == [[3.0, 4.0], [8.0, 16.0]]


def test_only_supervised_positions_reach_the_head():
    made = stepper("train.sft", "nll")
    seen: list[int] = []
    made.model.lm_head.register_forward_hook(
        lambda module, inputs, output: seen.append(output.numel() // output.shape[-1])
    )
    rows = examples("train.sft")
    made.backward(rows)
    assert sum(seen) == sum(each.predicted for row in rows for each in row.sequences)
