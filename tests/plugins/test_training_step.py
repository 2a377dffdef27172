"""A step is the same however it is cut, laid out, ordered and shared, for every trainer and loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.step_cases import EVERY_LAYOUT, EVERY_TRAINING
from helpers.stepping import (
    assert_same,
    examples,
    gradient,
    plain,
    stepper,
)

from posttrain.contracts.trainer import TokenSequence
from posttrain_plugins.training.batches import Budget


@EVERY_TRAINING
@EVERY_LAYOUT
@pytest.mark.parametrize("tokens", [1, 60, 150])
def test_neither_cut_nor_layout_changes_loss_metrics_or_gradient(
    uses: str, loss: str, layout: str, tokens: int
):
    rows = examples(uses)
    whole, metrics, expected = plain(uses, loss)
    cut, cut_metrics, found = gradient(stepper(uses, loss, tokens, layout), rows)
    assert cut == pytest.approx(whole, rel=1e-6)
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_same(found, expected)


@EVERY_TRAINING
def test_bounding_the_supervised_tokens_changes_no_gradient(uses: str, loss: str):
    rows = examples(uses)
    _, _, expected = plain(uses, loss)
    made = stepper(uses, loss)
    made.budget = Budget(10_000, max(row.predicted for row in rows))
    assert_same(gradient(made, rows)[2], expected)
    assert len(list(made.micro_batches(rows))) > 1


@EVERY_TRAINING
def test_what_fits_is_not_cut(uses: str, loss: str):
    assert len(list(stepper(uses, loss).micro_batches(examples(uses)))) == 1


@EVERY_TRAINING
@EVERY_LAYOUT
def test_the_order_of_rows_changes_nothing(uses: str, loss: str, layout: str):
    rows = examples(uses)
    _, _, expected = plain(uses, loss)
    _, _, found = gradient(stepper(uses, loss, 80, layout), rows[::-1])
    assert_same(found, expected)


@EVERY_TRAINING
@EVERY_LAYOUT
def test_padding_changes_nothing(uses: str, loss: str, layout: str):
    rows = examples(uses)
    _, _, expected = plain(uses, loss)
    other = stepper(uses, loss, layout=layout)
    other.pad = 17
    assert_same(gradient(other, rows)[2], expected)
    lengthened = [replace(row, sequences=tuple(_with_tail(each) for each in row.sequences)) for row in rows]
    assert_same(gradient(stepper(uses, loss, layout=layout), lengthened)[2], expected)


def _with_tail(each: TokenSequence) -> TokenSequence:
    return replace(each, tokens=[*each.tokens, 8, 8, 8], supervised=[*each.supervised, False, False, False])


@EVERY_TRAINING
def test_unsupervised_positions_have_no_gradient(uses: str, loss: str):
    """A token that nobody predicts and that is in no context of a supervised one may be any other."""
    rows, made = examples(uses), stepper(uses, loss)
    tailed = [replace(row, sequences=tuple(_with_tail(each) for each in row.sequences)) for row in rows]
    _, _, expected = gradient(made, tailed)
    other = [
        replace(
            row,
            sequences=tuple(replace(each, tokens=[*each.tokens[:-3], 9, 10, 11]) for each in row.sequences),
        )
        for row in tailed
    ]
    assert_same(gradient(stepper(uses, loss), other)[2], expected)


@EVERY_TRAINING
def test_evaluation_tells_what_the_step_would_come_to_and_changes_nothing(uses: str, loss: str):
    rows, made = examples(uses), stepper(uses, loss, 70)
    made.model.zero_grad()
    before = made.state
    found = made.evaluate(rows)
    assert all(p.grad is None for p in made.model.parameters())
    assert made.state is before
    if not before:
        assert found.loss == pytest.approx(made.backward(rows).loss, rel=1e-6)
