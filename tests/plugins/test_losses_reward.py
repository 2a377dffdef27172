"""Losses over rewards: worked by hand, stable, and what they mean for rankings and ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import Family, Need
from posttrain_plugins.losses.reward.bradley_terry import BradleyTerry, BradleyTerryOptions
from posttrain_plugins.losses.reward.plackett_luce import PlackettLuce
from posttrain_plugins.losses.reward.regression import Regression
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.worked import worked

LOSSES = (BradleyTerry, PlackettLuce, Regression)
EVERY = pytest.mark.parametrize("loss", LOSSES)


def total(loss: type[Any], reward: torch.Tensor, **values: Any) -> torch.Tensor:
    batch = batch_of(Family.REWARD, dtype=reward.dtype, reward=reward, **values)
    output = loss()(batch, loss.config(), {}, {})
    return sum(each.weight * each.reduction.total(each.values, part_of(batch)) for each in output.terms)


def test_pairs_are_worked_by_hand():
    assert worked(BradleyTerry, reward=[3.0, 1.0]) == pytest.approx(math.log1p(math.exp(-2)), abs=1e-4)
    assert worked(BradleyTerry, reward=[3.0, 1.0], margin=[2.0]) == pytest.approx(math.log(2), abs=1e-4)
    assert worked(BradleyTerry, reward=[1.0, 1.0, 5.0, 1.0], weight=[1.0, 0.0]) == pytest.approx(
        math.log(2) / 2, abs=1e-4
    )
    assert worked(BradleyTerry, {"center": 0.5}, reward=[2.0, -2.0]) == pytest.approx(
        math.log1p(math.exp(-4)), abs=1e-4
    )


def test_several_answers_are_a_pair_each_and_their_prompt_counts_once():
    pairs = [math.log1p(math.exp(-gap)) for gap in (1.0, 2.0, 1.0)]
    ranked = {"reward": [2.0, 1.0, 0.0], "score": [9.0, 5.0, 1.0], "example": [0, 0, 0]}
    assert worked(BradleyTerry, **ranked) == pytest.approx(sum(pairs) / 3, abs=1e-4)
    both = {"reward": [2.0, 1.0, 0.0, 4.0, 4.0], "score": [9.0, 5.0, 1.0, 1.0, 0.0]}
    assert worked(BradleyTerry, **both, example=[0, 0, 0, 1, 1]) == pytest.approx(
        (sum(pairs) / 3 + math.log(2)) / 2, abs=1e-4
    )


def test_a_ranking_is_drawn_best_first():
    ranked = {"reward": [0.0, 2.0, 1.0], "score": [1.0, 3.0, 2.0], "example": [0, 0, 0]}
    best = math.log(math.exp(2) + math.exp(1) + 1) - 2
    second = math.log(math.exp(1) + 1) - 1
    assert worked(PlackettLuce, **ranked) == pytest.approx(best + second, abs=1e-4)


def test_answers_that_are_as_good_as_each_other_are_not_contrasted():
    tied = {"reward": [1.0, 4.0, 0.0], "score": [2.0, 2.0, 1.0], "example": [0, 0, 0]}
    expected = math.log1p(math.exp(-1)) + math.log1p(math.exp(-4))
    assert worked(PlackettLuce, **tied) == pytest.approx(expected, abs=1e-4)
    assert worked(BradleyTerry, **tied) == pytest.approx(expected / 2, abs=1e-4)


@pytest.mark.parametrize("loss", [BradleyTerry, PlackettLuce])
def test_answers_to_different_prompts_are_never_compared(loss: type[Any]):
    reward = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = total(loss, reward, score=[1.0, 2.0, 3.0], example=[0, 1, 2])
    found.backward()
    assert found.item() == pytest.approx(0.0, abs=1e-7)
    assert reward.grad is not None and reward.grad.abs().max() < 1e-7


def test_ranking_two_answers_is_a_pair():
    reward = torch.tensor([0.3, -1.2, 2.0, 2.5], dtype=torch.float64)
    assert float(total(PlackettLuce, reward)) == pytest.approx(float(total(BradleyTerry, reward)))


def test_a_score_is_met_squarely():
    assert worked(Regression, reward=[1.0, 3.0], score=[0.5, 1.0], example=[0, 1], weight=[2.0, 1.0]) == 2.25


@EVERY
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_rewards_have_finite_values_and_gradients(loss: type[Any], size: float):
    reward = torch.tensor([size, 0.0, -size, size], requires_grad=True)
    found = total(loss, reward, score=[3.0, 2.0, 1.0, 0.0], example=[0, 0, 0, 0])
    found.backward()
    assert reward.grad is not None
    assert math.isfinite(found.item()) and bool(reward.grad.isfinite().all())


@EVERY
def test_gradients_are_those_of_the_values(loss: type[Any]):
    reward = torch.tensor([0.4, -0.3, 1.0, 0.2], dtype=torch.float64, requires_grad=True)
    ranked = {"score": [3.0, 1.0, 2.0, 2.0], "example": [0, 0, 0, 1]}
    assert torch.autograd.gradcheck(lambda given: total(loss, given, **ranked), (reward,))


@pytest.mark.parametrize("loss", [BradleyTerry, PlackettLuce])
def test_a_better_answer_is_pushed_up_and_a_worse_one_down(loss: type[Any]):
    reward = torch.tensor([0.0, 0.0], requires_grad=True)
    total(loss, reward).backward()
    assert reward.grad is not None
    assert reward.grad.tolist() == pytest.approx([-0.5, 0.5])
    assert loss().needs - {Need.MARGIN} == {Need.RIVALS}


def test_metrics_say_how_often_the_better_answer_gets_more():
    batch = batch_of(Family.REWARD, reward=[1.0, 0.0, 2.0, 3.0])
    metrics = BradleyTerry()(batch, BradleyTerryOptions(), {}, {}).metrics
    assert metrics["accuracy"].tolist() == [1.0, 0.0]
    assert metrics["rewards/margin"].tolist() == [1.0, -1.0]
    assert metrics["rewards/mean"].tolist() == [1.0, 0.0, 2.0, 3.0]
    assert not any(each.requires_grad for each in metrics.values())
    alone = batch_of(Family.REWARD, reward=[1.0], score=[0.5], example=[0])
    assert not len(Regression()(alone, Regression.config(), {}, {}).metrics["accuracy"])


@pytest.mark.parametrize("options", [{"center": -0.1}, {"center": float("nan")}, {"centre": 0.1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]):
    with pytest.raises(ValidationError):
        BradleyTerryOptions(**options)
