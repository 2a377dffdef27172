from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama

from posttrain.errors import DataError, StageError
from posttrain_plugins.evaluation import likelihood
from posttrain_plugins.evaluation.likelihood import completion_nll
from posttrain_plugins.templates.encoder import Encoded
from posttrain_plugins.training.head import KeepHead, choice

SEQUENCES = [
    Encoded(tokens=[9, 10, 11, 3], supervised=[False, False, True, True]),
    Encoded(tokens=[9, 10, 12, 13, 14, 15, 3], supervised=[False] * 2 + [True, False, True, True, True]),
    Encoded(tokens=[20, 21], supervised=[False, False]),
    Encoded(tokens=[20, 21, 22], supervised=[False, True, True]),
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


class Plain(torch.nn.Module):
    """A model whose forward cannot be asked for some positions' logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama(40, initializer_range=0.5)
        self.config = self.inner.config

    def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, use_cache=use_cache)


def test_a_model_without_selected_logits_is_scored_all_the_same_and_said() -> None:
    told: list[str] = []
    found = completion_nll(SimpleNamespace(model=Plain()), SEQUENCES, batch_tokens=1000, warn=told.append)
    expected = completion_nll(policy(), SEQUENCES, batch_tokens=1000)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    assert [nll for nll, _ in found] == pytest.approx([nll for nll, _ in expected], abs=1e-5)
    assert len(told) == 1 and "all logits are computed" in told[0] and "logits_to_keep" in told[0]


def test_logits_are_bounded_where_the_model_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = policy(), []
    expected = completion_nll(model, SEQUENCES, batch_tokens=1000)
    # As many logits as 5 tokens have
    monkeypatch.setattr(choice, "LOGITS", 4 * 5 * 40)
    monkeypatch.setattr(likelihood, "choose_head", lambda *_: (KeepHead(), None))
    model.model.lm_head.register_forward_hook(lambda module, inputs, output: held.append(output.shape[0]))
    found = completion_nll(model, SEQUENCES, batch_tokens=1000)
    # 4 tokens alone, then 2, 0 and 2 together
    assert held == [4, 4]
    assert [nll for nll, _ in found] == pytest.approx([nll for nll, _ in expected], abs=1e-5)


def test_nothing_to_score_is_a_sum_of_nothing() -> None:
    assert completion_nll(policy(), SEQUENCES[2:3], batch_tokens=10) == [(0.0, 0)]


def test_too_long_a_sequence_is_refused() -> None:
    long = Encoded(tokens=[9] * 129, supervised=[True] * 129)
    with pytest.raises(DataError, match="longer than the model's context"):
        completion_nll(policy(), [long], batch_tokens=10)


def test_a_likelihood_that_is_not_finite_is_refused() -> None:
    broken = policy()
    with torch.no_grad():
        broken.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(StageError, match="not finite"):
        completion_nll(broken, SEQUENCES, batch_tokens=100)
