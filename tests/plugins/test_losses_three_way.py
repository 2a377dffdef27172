"""Losses over pairs beside a gold answer."""

from __future__ import annotations

from math import exp, log, log1p
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import Loss, ThreeWayBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN, RoleTokenMean
from posttrain_plugins.losses.preference.cpo import Cpo
from posttrain_plugins.losses.preference.simpo import Simpo
from posttrain_plugins.losses.three_way.tpo import Tpo, TpoOptions
from posttrain_plugins.losses.three_way.tpo_l import TpoL, TpoLOptions
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.stepping import Shown, take_step
from posttrain_plugins.testing.worked import worked

LOSSES: list[type[Loss]] = [Tpo, TpoL]
every_loss = pytest.mark.parametrize("loss", LOSSES)
ANSWERS = {"chosen": [-2.0, -1.0], "rejected": [-4.0, -9.0], "gold": [-3.0, -6.0]}
COUNTS = {"chosen_tokens": [4, 2], "rejected_tokens": [1, 3], "gold_tokens": [2, 1]}


def rows(dtype: torch.dtype = torch.float64, **values: Any) -> ThreeWayBatch:
    batch: ThreeWayBatch = batch_of(Tpo.family, dtype, **{**ANSWERS, **COUNTS, **values})
    for side in (batch.chosen, batch.rejected, batch.gold):
        side.requires_grad_()
    return batch


def step(loss: type[Loss], config: Any, batch: Any) -> torch.Tensor:
    return take_step(loss(), config, [Shown(batch, part_of(batch), batch)]).total


def value(loss: type[Loss], batch: ThreeWayBatch, **options: Any) -> torch.Tensor:
    return step(loss, loss.config(**options), batch)


def test_tpo_worked_out_by_hand():
    batch = rows(weight=[1.0, 0.5])
    found = value(Tpo, batch, beta=0.5, tpo_alpha=0.25)
    ranked = (log1p(exp(-0.5 * 2)) + 0.5 * log1p(exp(-0.5 * 8))) / 2
    assert found.item() == pytest.approx(ranked + 0.25 * (3 + 0.5 * 6) / 3)
    found.backward()
    assert batch.gold.grad.tolist() == pytest.approx([-0.25 / 3, -0.125 / 3])
    assert batch.chosen.grad[0].item() == pytest.approx(-0.5 / (1 + exp(1)) / 2)
    assert batch.rejected.grad[0].item() == pytest.approx(0.5 / (1 + exp(1)) / 2)


def test_tpo_l_worked_out_by_hand():
    # Mean log-probs are −½, −4 and −½, −3: 2 (3.5, 2.5) − 1 = 6, 4
    ranked = (log1p(exp(-6)) + log1p(exp(-4))) / 2
    assert value(TpoL, rows(), beta=2.0, gamma=1.0).item() == pytest.approx(ranked + 9 / 3)
    assert value(TpoL, rows(), beta=2.0, gamma_beta_ratio=0.5).item() == pytest.approx(ranked + 9 / 3)


@pytest.mark.parametrize(
    ("loss", "alike", "options"),
    [(Tpo, Cpo, {"beta": 0.3}), (TpoL, Simpo, {"beta": 0.3, "gamma": 0.1, "label_smoothing": 0.2})],
)
def test_a_gold_answer_that_is_the_chosen_one_is_learned_as_cpo_does(
    loss: type[Loss], alike: type[Loss], options: dict[str, float]
):
    three = rows(gold=ANSWERS["chosen"], gold_tokens=COUNTS["chosen_tokens"])
    two = batch_of(
        alike.family, **{name: each for name, each in {**ANSWERS, **COUNTS}.items() if "gold" not in name}
    )
    config = alike.config(cpo_alpha=0.7, **options)
    expected = step(alike, config, two)
    assert value(loss, three, tpo_alpha=0.7, **options).item() == pytest.approx(expected.item())


@every_loss
def test_terms_and_their_reductions(loss: type[Loss]):
    terms = loss()(rows(), loss.config(tpo_alpha=0.3), {}, {}).terms
    assert [(term.reduction, term.weight) for term in terms] == [
        (EXAMPLE_MEAN, 1.0),
        (RoleTokenMean("gold"), 0.3),
    ]


@every_loss
def test_every_answer_is_pulled_the_right_way(loss: type[Loss]):
    batch = rows()
    value(loss, batch).backward()
    assert (batch.chosen.grad < 0).all() and (batch.gold.grad < 0).all() and (batch.rejected.grad > 0).all()


@every_loss
def test_row_weights_multiply_every_term(loss: type[Loss]):
    plain = loss()(rows(), loss.config(), {}, {}).terms
    weighed = loss()(rows(weight=[0.0, 3.0]), loss.config(), {}, {}).terms
    for one, other in zip(plain, weighed, strict=True):
        assert other.values.tolist() == pytest.approx([0.0, 3 * one.values[1].item()])


@every_loss
def test_ten_thousand_nats_are_finite(loss: type[Loss]):
    batch = rows(torch.float32, chosen=[-1e4, 0.0], rejected=[0.0, -1e4], gold=[-1e4, 0.0])
    found = value(loss, batch)
    found.backward()
    assert found.isfinite()
    assert all(side.grad.isfinite().all() for side in (batch.chosen, batch.rejected, batch.gold))


def test_metrics():
    metrics = Tpo()(rows(), TpoOptions(beta=0.5), {}, {}).metrics
    assert metrics["rewards/chosen"].tolist() == [-1.0, -0.5]
    assert metrics["rewards/margin"].tolist() == [1.0, 4.0]
    assert metrics["logps/gold"].tolist() == [-3.0, -6.0]
    assert not any(each.requires_grad for each in metrics.values())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (TpoOptions, {"beta": 0}),
        (TpoOptions, {"tpo_alpha": 0}),
        (TpoOptions, {"gamma": 1.0}),
        (TpoLOptions, {"beta": -1}),
        (TpoLOptions, {"gamma": 1.0, "gamma_beta_ratio": 0.5}),
        (TpoLOptions, {"tpo_alpha": -1}),
    ],
)
def test_impossible_options_are_refused(model: Any, options: dict[str, float]):
    with pytest.raises(ValidationError):
        model(**options)


def test_defaults_are_those_of_the_authors():
    assert (TpoOptions().beta, TpoOptions().tpo_alpha) == (0.01, 1.0)
    assert (TpoLOptions().beta, TpoLOptions().margin) == (2.0, pytest.approx(1.6))


def test_equal_answers_cost_ln_2():
    assert worked(Tpo, {"tpo_alpha": 1e-9}, chosen=[-1.0], rejected=[-1.0], gold=[-1.0]) == round(log(2), 4)
