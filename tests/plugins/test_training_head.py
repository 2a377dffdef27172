from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training import head as heads
from posttrain_plugins.training.batches import MicroBatch, collate
from posttrain_plugins.training.head import TokenLogProbs, choose_head, full_logits, selected_logits


def probe() -> MicroBatch:
    sequences = [[3, 4, 5], [7, 8, 9, 10, 11, 12]]
    examples = [
        Example(row, (TokenSequence(tokens, [i > 0 for i in range(len(tokens))], "completion"),))
        for row, tokens in enumerate(sequences)
    ]
    return collate(examples, 0, torch.device("cpu"))


@pytest.mark.parametrize("chunk", [1, 30, 1 << 22])
def test_log_probs_entropy_and_gradient_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(heads, "CHUNK", chunk)
    torch.manual_seed(0)
    logits = torch.randn(7, 13, requires_grad=True)
    targets, pull = torch.randint(13, (7,)), torch.randn(7)
    logp, entropy, top1 = TokenLogProbs.apply(logits, targets, True)
    (found,) = torch.autograd.grad((logp * pull).sum(), logits)
    everything = logits.log_softmax(-1)
    expected = everything.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, -(everything.exp() * everything).sum(-1).detach())
    assert top1.tolist() == (logits.argmax(-1) == targets).tolist()
    torch.testing.assert_close(found, torch.autograd.grad((expected * pull).sum(), logits)[0])


def test_log_prob_worked_out_by_hand():
    # softmax(ln 1, ln 3) = (1/4, 3/4)
    logits = torch.tensor([[1.0, 3.0]]).log()
    logp, entropy, top1 = TokenLogProbs.apply(logits, torch.tensor([0]), True)
    assert logp.exp().item() == pytest.approx(0.25)
    assert entropy.item() == pytest.approx(0.562335, abs=1e-6)
    assert top1.item() is False


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(3, 5)
    before = logits.clone()
    TokenLogProbs.apply(logits, torch.tensor([0, 1, 2]), True)
    assert torch.equal(logits, before)


def test_impossible_tokens_give_no_nan():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    logp, entropy, _ = TokenLogProbs.apply(logits, torch.tensor([0]), True)
    logp.sum().backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_are_reduced_in_float32():
    torch.manual_seed(1)
    logits = torch.randn(4, 500).bfloat16()
    logp, _, _ = TokenLogProbs.apply(logits, torch.tensor([1, 2, 3, 4]), False)
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor([[1], [2], [3], [4]]))[:, 0]
    torch.testing.assert_close(logp, expected)


def test_a_model_that_selects_exactly_gets_the_fast_head():
    model = tiny_llama(40)
    micro = probe()
    assert choose_head(model, micro, 1e-5) == (selected_logits, None)
    with torch.no_grad():
        torch.testing.assert_close(selected_logits(model, micro), full_logits(model, micro))


class Odd(torch.nn.Module):
    """A model whose head does something else with `logits_to_keep`."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.inner, self.change = tiny_llama(40), change

    def forward(
        self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False, **rest: Any
    ) -> Any:
        logits = self.inner(input_ids, attention_mask=attention_mask, use_cache=use_cache).logits
        return SimpleNamespace(logits=self.change(logits, rest.get("logits_to_keep")))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda logits, keep: logits, "ignores `logits_to_keep`"),
        (lambda logits, keep: logits if keep is None else logits[keep] * 1.1, "differ from plain ones"),
    ],
)
def test_a_model_that_does_not_falls_back_and_says_so(change: Any, told: str):
    chosen, note = choose_head(Odd(change), probe(), 1e-4)
    assert chosen is full_logits
    assert told in note


def test_a_model_without_the_argument_falls_back():
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama(40)

        def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
            return self.inner(input_ids, attention_mask=attention_mask, use_cache=use_cache)

    model = Plain().train()
    chosen, note = choose_head(model, probe(), 1e-4)
    assert chosen is full_logits and "takes no `logits_to_keep`" in note
    assert model.training
