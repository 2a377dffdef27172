"""The cross-entropy of steps: worked by hand, equal to that of two classes, whatever becomes of its input."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import Family
from posttrain_plugins.losses.process_reward.step_cross_entropy import StepCrossEntropy
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.worked import worked

LOGIT = [0.0, math.log(3), -2.0, 30.0]


def output(**values):
    batch = batch_of(Family.PROCESS_REWARD, **values)
    return StepCrossEntropy()(batch, NoOptions(), {}, {})


def test_hard_labels_cost_the_log_probability_of_the_class():
    assert worked(StepCrossEntropy, logit=[math.log(3)], label=[1.0]) == round(-math.log(3 / 4), 4)
    assert worked(StepCrossEntropy, logit=[math.log(3)], label=[0.0]) == round(-math.log(1 / 4), 4)


def test_it_is_the_cross_entropy_of_two_classes():
    outputs = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    label = torch.arange(50) % 2
    (term,) = output(logit=outputs[:, 1] - outputs[:, 0], label=label.double()).terms
    expected = torch.nn.functional.cross_entropy(outputs, label, reduction="none")
    torch.testing.assert_close(term.values, expected)


@pytest.mark.parametrize("label", [0.01, 0.1, 0.5, 0.9])
def test_a_soft_label_is_least_where_the_model_says_so(label: float):
    odds = torch.linspace(-6, 6, 2401, dtype=torch.float64)
    (term,) = output(logit=odds, label=torch.full_like(odds, label)).terms
    assert odds[term.values.argmin()].sigmoid().item() == pytest.approx(label, abs=2e-3)
    entropy = -label * math.log(label) - (1 - label) * math.log(1 - label)
    assert term.values.min().item() == pytest.approx(entropy, abs=1e-4)


def test_the_mean_is_over_the_steps_and_not_over_the_answers():
    one_and_three = {"logit": LOGIT, "label": [1.0, 1.0, 0.0, 0.0], "example": [0, 1, 1, 1]}
    values = [math.log(2), -math.log(0.75), math.log1p(math.exp(-2)), 30.0]
    assert worked(StepCrossEntropy, **one_and_three) == round(sum(values) / 4, 4)


def test_weights_multiply_the_values_of_a_rows_steps():
    (term,) = output(logit=[0.0, 0.0, 0.0], label=[1.0, 0.0, 1.0], weight=[2.0, 2.0, 0.0]).terms
    torch.testing.assert_close(term.values, math.log(2) * term.values.new_tensor([2, 2, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_any_size_have_finite_values_and_gradients(dtype: torch.dtype):
    logit = torch.tensor([-1e4, 1e4, -1e4, 1e4], dtype=dtype, requires_grad=True)
    batch = batch_of(Family.PROCESS_REWARD, dtype, logit=logit, label=[1.0, 0.0, 0.0, 0.25])
    (term,) = StepCrossEntropy()(batch, NoOptions(), {}, {}).terms
    assert term.values.tolist() == [1e4, 1e4, 0.0, 7500.0]
    (gradient,) = torch.autograd.grad(term.reduction.total(term.values, part_of(batch)), logit)
    assert gradient.tolist() == [-0.25, 0.25, 0.0, pytest.approx(0.1875)]


def test_metrics_tell_steps_and_whole_answers():
    metrics = output(
        logit=[1.0, -1.0, 2.0, 3.0, -1.0], label=[1.0, 0.0, 0.0, 0.9, 0.5], example=[4, 4, 7, 7, 9]
    ).metrics
    assert metrics["accuracy"][:4].tolist() == [1, 1, 0, 1]
    assert metrics["accuracy"][4].isnan(), "a label of one half has no side"
    assert metrics["answers/accuracy"][:2].tolist() == [1, 0]
    assert metrics["answers/accuracy"][2].isnan(), "no step of that answer has a side"
    assert metrics["steps/label"].mean().item() == pytest.approx(0.48)
    assert metrics["steps/probability"][0].item() == pytest.approx(0.7311, abs=1e-4)
