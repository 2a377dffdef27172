"""Losses over pairs that depend on the step: sorted ones, and those that remember."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.stepping import examples, gradient, stepper

from posttrain.contracts.loss import Family, PreferenceBatch
from posttrain_plugins.losses.preference.aot import Aot
from posttrain_plugins.losses.preference.aot_unpaired import AotUnpaired
from posttrain_plugins.losses.preference.bco_pair import BcoPair
from posttrain_plugins.losses.preference.transport import coupling
from posttrain_plugins.testing.batches import batch_of


def pairs(chosen: list[float], rejected: list[float], weight: list[float] | None = None) -> PreferenceBatch:
    more = {} if weight is None else {"weight": weight}
    batch: PreferenceBatch = batch_of(Family.PREFERENCE, chosen=chosen, rejected=rejected, **more)
    batch.chosen.requires_grad_()
    return batch


def total(loss: Any, batch: PreferenceBatch) -> torch.Tensor:
    (term,) = loss(batch, loss.config(beta=1.0), {}, {}).terms
    assert term.values.shape == batch.chosen.shape
    return term.values.sum()


def test_equal_weights_match_by_rank():
    found = coupling(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([10.0, 30.0, 20.0]), torch.ones(3))
    kept = found.mass > 0
    matched = sorted(zip(found.left[kept].tolist(), found.right[kept].tolist(), strict=True))
    assert matched == [(0, 1), (1, 0), (2, 2)]
    assert found.mass[kept].tolist() == [1.0, 1.0, 1.0]


def test_weights_are_split_among_what_they_match():
    # 1 weighs 1, 2 weighs 3; 10 weighs 3, 20 weighs 1: 1–10 by 1, 2–10 by 2, 2–20 by 1.
    found = coupling(torch.tensor([1.0, 2.0]), torch.tensor([20.0, 10.0]), torch.tensor([1.0, 3.0]))
    kept = found.mass > 0
    parts = (found.left[kept].tolist(), found.right[kept].tolist(), found.mass[kept].tolist())
    assert set(zip(*parts, strict=True)) == {(0, 1, 1.0), (1, 1, 2.0), (1, 0, 1.0)}


@pytest.mark.parametrize("kind", [Aot, AotUnpaired])
def test_a_row_of_weight_two_counts_as_two_rows_and_one_of_weight_zero_as_none(kind: type[Any]):
    weighted = pairs([1.0, 4.0, 2.5], [3.0, -1.0, 0.0], [2.0, 1.0, 0.0])
    written_out = pairs([1.0, 1.0, 4.0], [3.0, 3.0, -1.0])
    first, second = total(kind(), weighted), total(kind(), written_out)
    assert first.item() == pytest.approx(second.item())
    first.backward()
    second.backward()
    expected = [written_out.chosen.grad[:2].sum().item(), written_out.chosen.grad[2].item(), 0.0]
    assert weighted.chosen.grad.tolist() == pytest.approx(expected)


def test_unpaired_rewards_are_compared_rank_by_rank():
    # Sorted: −2, 1 against −3, 0.
    expected = 2 * math.log1p(math.exp(-1.0))
    assert total(AotUnpaired(), pairs([1.0, -2.0], [0.0, -3.0])).item() == pytest.approx(expected)
    assert total(AotUnpaired(), pairs([1.0, -2.0], [-3.0, 0.0])).item() == pytest.approx(expected)


def test_one_pair_is_matched_with_itself():
    assert total(Aot(), pairs([1.0], [0.0])).item() == pytest.approx(math.log1p(math.exp(-1.0)))


def test_the_shift_is_the_mean_reward_of_all_steps():
    loss, config = BcoPair(), BcoPair.config(beta=0.5)
    # Rewards 1, 0, 2, −1 (mean ½), then 3, 1, whose row counts twice: (2 + 2·4) / (4 + 4) = 1.25.
    first = pairs([2.0, 4.0], [0.0, -2.0])
    state = loss.advance(loss.begin(config), loss.measure(first, config, {}), config)
    assert state == {"mean": 0.5, "weight": 4.0}
    second = pairs([6.0], [2.0], [2.0])
    state = loss.advance(state, loss.measure(second, config, state), config)
    assert state == {"mean": 1.25, "weight": 8.0}
    output = loss(second, config, {}, state)
    expected = 2 * (math.log1p(math.exp(-1.75)) + math.log1p(math.exp(-0.25)))
    assert output.terms[0].values.item() == pytest.approx(expected)
    assert output.metrics["rewards/shift"].item() == 1.25
    nothing = loss.measure(pairs([9.0], [0.0], [0.0]), config, state)
    assert loss.advance(state, nothing, config) == state


def test_the_shift_is_of_the_whole_step_however_it_is_cut():
    rows = examples("train.dpo")
    whole, cut = stepper("train.dpo", "bco_pair"), stepper("train.dpo", "bco_pair", tokens=1)
    _, metrics, _ = gradient(whole, rows)
    gradient(cut, rows)
    assert cut.state["mean"] == pytest.approx(whole.state["mean"], rel=1e-5)
    assert metrics["rewards/shift"] == pytest.approx(whole.state["mean"], rel=1e-5)
    assert whole.state["weight"] == 2 * sum(row.weight for row in rows)
    before = dict(whole.state)
    whole.evaluate(rows)
    assert whole.state == before
