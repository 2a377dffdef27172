from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import PreferenceBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.preference.sigmoid import Sigmoid, SigmoidOptions


def batch(
    chosen: list[float], rejected: list[float], reference: tuple[list[float], list[float]]
) -> PreferenceBatch:
    size = len(chosen)
    return PreferenceBatch(
        chosen=torch.tensor(chosen, requires_grad=True),
        rejected=torch.tensor(rejected, requires_grad=True),
        reference_chosen=torch.tensor(reference[0]),
        reference_rejected=torch.tensor(reference[1]),
        chosen_tokens=torch.ones(size),
        rejected_tokens=torch.ones(size),
        weight=torch.ones(size),
    )


def test_equal_to_the_reference_gives_ln_2_whatever_the_options():
    pairs = batch([-3.0, -9.0], [-5.0, -1.0], ([-3.0, -9.0], [-5.0, -1.0]))
    for options in (SigmoidOptions(), SigmoidOptions(beta=2.0, label_smoothing=0.3)):
        (term,) = Sigmoid()(pairs, options, {}, {}).terms
        assert term.values.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-7)
        assert term.reduction is EXAMPLE_MEAN


def test_value_and_gradient_worked_out_by_hand():
    # Δ = (−1 + 3) − (−4 + 3) = 3; β Δ = 1.5; L = ln(1 + e^−1.5); ∂L/∂chosen = −β σ(−1.5)
    pairs = batch([-1.0], [-4.0], ([-3.0], [-3.0]))
    (term,) = Sigmoid()(pairs, SigmoidOptions(beta=0.5), {}, {}).terms
    assert term.values.item() == pytest.approx(math.log1p(math.exp(-1.5)), abs=1e-7)
    term.values.sum().backward()
    slope = 0.5 / (1 + math.exp(1.5))
    assert pairs.chosen.grad.item() == pytest.approx(-slope, abs=1e-7)
    assert pairs.rejected.grad.item() == pytest.approx(slope, abs=1e-7)


def test_label_smoothing_mixes_in_the_swapped_pair():
    pairs = batch([-1.0], [-4.0], ([-3.0], [-3.0]))
    (term,) = Sigmoid()(pairs, SigmoidOptions(beta=0.5, label_smoothing=0.2), {}, {}).terms
    expected = 0.8 * math.log1p(math.exp(-1.5)) + 0.2 * math.log1p(math.exp(1.5))
    assert term.values.item() == pytest.approx(expected, abs=1e-6)


def test_weight_multiplies_values():
    pairs = batch([-1.0, -1.0], [-4.0, -4.0], ([-3.0, -3.0], [-3.0, -3.0]))
    pairs.weight[1] = 0.25
    (term,) = Sigmoid()(pairs, SigmoidOptions(), {}, {}).terms
    assert term.values[1].item() == pytest.approx(0.25 * term.values[0].item())


def test_diagnostics():
    pairs = batch([-1.0, -6.0], [-4.0, -2.0], ([-3.0, -3.0], [-3.0, -3.0]))
    metrics = {
        name: values.tolist()
        for name, values in Sigmoid()(pairs, SigmoidOptions(beta=0.5), {}, {}).metrics.items()
    }
    assert metrics == {
        "rewards/chosen": [1.0, -1.5],
        "rewards/rejected": [-0.5, 0.5],
        "rewards/margin": [1.5, -2.0],
        "rewards/accuracy": [1.0, 0.0],
        "logps/chosen": [-1.0, -6.0],
        "logps/rejected": [-4.0, -2.0],
    }


@pytest.mark.parametrize(
    "options", [{"beta": 0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"tau": 1}]
)
def test_impossible_options_are_refused(options: dict[str, float]):
    with pytest.raises(ValidationError):
        SigmoidOptions(**options)
