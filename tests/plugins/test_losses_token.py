"""Losses over supervised tokens beside `nll`."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import Loss, TokenBatch
from posttrain_plugins.losses.token.dft import Dft
from posttrain_plugins.losses.token.focal import Focal, FocalOptions
from posttrain_plugins.losses.token.label_smoothing import LabelSmoothing, LabelSmoothingOptions
from posttrain_plugins.losses.token.nll import Nll
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.stepping import Shown, take_step
from posttrain_plugins.training.head import Wanted, logit_scores

LOSSES: list[type[Loss]] = [Dft, Focal, LabelSmoothing]
every_loss = pytest.mark.parametrize("loss", LOSSES)


def tokens(probabilities: list[float], dtype: torch.dtype = torch.float64, **values: Any) -> TokenBatch:
    logp = torch.tensor(probabilities, dtype=torch.float64).log()
    batch: TokenBatch = batch_of(
        Nll.family, dtype, **{"logp": logp, "mean_logp": logp - 1, "example": [0] * len(logp), **values}
    )
    batch.logp.requires_grad_()
    return batch


def step(loss: type[Loss], config: Any, batch: Any) -> torch.Tensor:
    return take_step(loss(), config, [Shown(batch, part_of(batch), batch)]).total


def value(loss: type[Loss], batch: TokenBatch, **options: Any) -> torch.Tensor:
    return step(loss, loss.config(**options), batch)


def test_dft_weighs_a_token_by_its_probability_and_learns_nothing_of_that_weight():
    batch = tokens([0.5, 0.1], weight=[1.0, 2.0])
    found = value(Dft, batch)
    assert found.item() == pytest.approx((0.5 * log(2) + 2 * 0.1 * log(10)) / 2)
    found.backward()
    assert batch.logp.grad.tolist() == pytest.approx([-0.5 / 2, -2 * 0.1 / 2])


def test_focal_learns_of_both_factors():
    batch = tokens([0.5, 0.1])
    found = value(Focal, batch, gamma=3.0)
    assert found.item() == pytest.approx((0.5**3 * log(2) + 0.9**3 * log(10)) / 2)
    found.backward()

    def slope(p: float) -> float:
        # d/d log p of −(1 − p)³ log p
        return -((1 - p) ** 3) + 3 * p * (1 - p) ** 2 * log(p)

    assert batch.logp.grad.tolist() == pytest.approx([slope(0.5) / 2, slope(0.1) / 2])


def test_focal_with_a_small_gamma_is_the_likelihood():
    batch = tokens([0.5, 0.1, 0.9])
    assert value(Focal, batch, gamma=1e-7).item() == pytest.approx(value(Nll, batch).item(), abs=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_of_certain_and_impossible_tokens(gamma: float):
    batch = tokens([1.0], torch.float32)
    extreme = tokens([1.0] * 3, torch.float32, logp=[0.0, -1e-8, -1e4], example=[0, 0, 0])
    for each in (batch, extreme):
        found = value(Focal, each, gamma=gamma)
        found.backward()
        assert found.isfinite() and each.logp.grad.isfinite().all()
    assert extreme.logp.grad[2].item() == pytest.approx(-1 / 3)


@pytest.mark.parametrize("epsilon", [0.1, 0.6])
def test_label_smoothing_is_the_cross_entropy_of_smoothed_labels(epsilon: float):
    """Against torch's own, with what the head gives, and so is the gradient of the logits."""
    logits = torch.randn(
        5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    scores = logit_scores(logits, targets, Wanted(mean_logp=True))
    assert scores.mean_logp is not None
    batch = TokenBatch(
        scores.logp,
        scores.entropy,
        scores.top1,
        torch.zeros(5, dtype=torch.long),
        torch.ones(5, dtype=torch.float64),
        mean_logp=scores.mean_logp,
    )
    found = value(LabelSmoothing, batch, epsilon=epsilon)
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=epsilon)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found, logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, logits)[0])


@every_loss
def test_row_weights_multiply_values(loss: type[Loss]):
    (plain,) = loss()(tokens([0.5, 0.1]), loss.config(), {}, {}).terms
    (weighed,) = loss()(tokens([0.5, 0.1], weight=[0.0, 3.0]), loss.config(), {}, {}).terms
    assert weighed.values.tolist() == pytest.approx([0.0, 3 * plain.values[1].item()])


@every_loss
def test_ten_thousand_nats_are_finite(loss: type[Loss]):
    batch = tokens([1.0] * 2, torch.float32, logp=[-1e4, 0.0], mean_logp=[-1e4, -20.0])
    found = value(loss, batch)
    found.backward()
    assert found.isfinite() and batch.logp.grad.isfinite().all()


@every_loss
def test_diagnostics_of_the_likelihood_are_kept(loss: type[Loss]):
    metrics = loss()(tokens([0.5, 0.1], top1=[True, False]), loss.config(), {}, {}).metrics
    assert metrics["token_accuracy"].tolist() == [1.0, 0.0]
    assert {"token_accuracy", "entropy"} < metrics.keys()
    assert not any(each.requires_grad for each in metrics.values())


def test_metrics_of_their_own():
    batch = tokens([0.5, 0.1])
    assert Dft()(batch, Dft.config(), {}, {}).metrics["dft/probability"].tolist() == pytest.approx([0.5, 0.1])
    factors = Focal()(batch, FocalOptions(gamma=2), {}, {}).metrics["focal/factor"]
    assert factors.tolist() == pytest.approx([0.25, 0.81])
    plain = LabelSmoothing()(batch, LabelSmoothingOptions(), {}, {}).metrics["nll/token"]
    assert [exp(-each) for each in plain.tolist()] == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (FocalOptions, {"gamma": 0}),
        (FocalOptions, {"gamma": -1}),
        (LabelSmoothingOptions, {"epsilon": 0}),
        (LabelSmoothingOptions, {"epsilon": 1}),
    ],
)
def test_impossible_options_are_refused(model: Any, options: dict[str, float]):
    with pytest.raises(ValidationError):
        model(**options)
