from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama

from posttrain.errors import DataError, StageError
from posttrain_plugins.evaluation.likelihood import completion_nll

SEQUENCES = [
    SimpleNamespace(tokens=[9, 10, 11, 3], supervised=[False, False, True, True]),
    SimpleNamespace(
        tokens=[9, 10, 12, 13, 14, 15, 3], supervised=[False] * 2 + [True, False, True, True, True]
    ),
    SimpleNamespace(tokens=[20, 21], supervised=[False, False]),
    SimpleNamespace(tokens=[20, 21, 22], supervised=[False, True, True]),
]


def policy() -> Any:
    return SimpleNamespace(model=tiny_llama(40, initializer_range=0.5))


@pytest.mark.parametrize("batch_tokens", [1, 9, 1000])
def test_equals_one_sequence_at_a_time_with_all_logits(batch_tokens: int) -> None:
    model = policy()
    found = completion_nll(model, SEQUENCES, batch_tokens=batch_tokens)
    for sequence, (nll, tokens) in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            logp = model.model(torch.tensor([sequence.tokens])).logits[0].double().log_softmax(-1)
        terms = [
            -float(logp[t - 1, sequence.tokens[t]])
            for t in range(1, len(sequence.tokens))
            if sequence.supervised[t]
        ]
        assert tokens == len(terms)
        assert nll == pytest.approx(sum(terms), abs=1e-5)


def test_too_long_a_sequence_is_refused() -> None:
    long = SimpleNamespace(tokens=[9] * 129, supervised=[True] * 129)
    with pytest.raises(DataError, match="longer than the model's context"):
        completion_nll(policy(), [long], batch_tokens=10)


def test_a_likelihood_that_is_not_finite_is_refused() -> None:
    broken = policy()
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(StageError, match="not finite"):
        completion_nll(broken, SEQUENCES, batch_tokens=100)
