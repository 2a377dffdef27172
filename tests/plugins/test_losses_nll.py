from __future__ import annotations

import pytest
import torch

from posttrain.contracts.component import NoOptions
from posttrain.contracts.loss import TokenBatch
from posttrain.contracts.reduction import TOKEN_MEAN
from posttrain_plugins.losses.token.nll import Nll


def batch(logp: torch.Tensor, weight: list[float]) -> TokenBatch:
    size = len(weight)
    return TokenBatch(
        logp=logp,
        entropy=torch.full((size,), 0.5),
        top1=torch.tensor([True, False, True]),
        example=torch.tensor([0, 0, 1]),
        weight=torch.tensor(weight),
    )


def test_values_are_weighted_negative_log_probs_per_token():
    logp = torch.tensor([-1.0, -3.0, -6.0], requires_grad=True)
    output = Nll()(batch(logp, [1.0, 1.0, 0.5]), NoOptions(), {}, {})
    (term,) = output.terms
    assert term.values.tolist() == [1.0, 3.0, 3.0]
    assert (term.reduction, term.weight) == (TOKEN_MEAN, 1.0)
    term.values.sum().backward()
    assert logp.grad.tolist() == [-1.0, -1.0, -0.5]


def test_diagnostics():
    metrics = Nll()(batch(torch.zeros(3, requires_grad=True), [1.0] * 3), NoOptions(), {}, {}).metrics
    assert metrics["token_accuracy"].mean().item() == pytest.approx(2 / 3)
    assert metrics["entropy"].tolist() == [0.5, 0.5, 0.5]
    assert not any(values.requires_grad for values in metrics.values())
