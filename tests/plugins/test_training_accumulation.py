"""Backward passes that add the head's gradient to what the weight has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain_plugins.backends.single import Single
from posttrain_plugins.training.accumulation import Accumulation, begun
from posttrain_plugins.training.head import Plan, Tail, Wanted, linear_scores
from posttrain_plugins.training.head.fused import Sink
from posttrain_plugins.training.lookup import Lookup

VOCABULARY, WIDTH, TOKENS = 11, 4, 5
MEMORY = pytest.mark.parametrize("memory", [0, 1 << 20], ids=["computed again", "kept"])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "capped": {"tail": Tail(2.0, 3.0)},
    "entropy": {"wanted": Wanted(entropy=True, entropy_gradient=True)},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "no tokens": {"tokens": 0},
}


def made(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype))


def loss(
    weight: Tensor,
    part: int,
    memory: int,
    *,
    bias: bool = False,
    tail: Tail | None = None,
    wanted: Wanted | None = None,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    tokens: int = TOKENS,
) -> Tensor:
    """Return what a micro-batch comes to, its chunks three tokens long."""
    generator = torch.Generator().manual_seed(part)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    plan = Plan(tail or Tail(), wanted or Wanted(), rows=3, memory=memory)
    shift = torch.ones(VOCABULARY, dtype=dtype) if bias else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = linear_scores(hidden, weight, shift, targets, plan)
    return found.logp.sum() + (found.entropy.sum() if wanted is not None else 0)


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward pass of the head, whether autograd was given a gradient of the weight."""
    told: list[bool] = []
    plain: Callable[..., tuple[Tensor | None, ...]] = Sink.gradients

    def gradients(self: Sink, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        found = plain(self, *inputs)
        told.append(found[1] is not None)
        return found

    monkeypatch.setattr(Sink, "gradients", gradients)
    return told


@MEMORY
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_micro_batches_add_up_in_place(case: dict[str, Any], memory: int, handed_on: list[bool]):
    dtype = case.get("dtype", torch.float32)
    plain, weight = made(dtype), made(dtype)
    for part in range(3):
        loss(plain, part, memory, **case).backward()
        del handed_on[part:]
        Accumulation().run(loss(weight, part, memory, **case))
    assert handed_on == [True, False, False], "the gradient of the first micro-batch is the room of all"
    assert weight.grad is not None and plain.grad is not None
    close = {"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(weight.grad, plain.grad, **close)


@MEMORY
def test_a_hook_on_the_weight_gets_each_gradient(memory: int, handed_on: list[bool]):
    plain, weight = made(), made()
    seen: list[Tensor] = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for part in range(2):
        loss(plain, part, memory).backward()
        Accumulation().run(loss(weight, part, memory))
    assert all(handed_on)
    torch.testing.assert_close(sum(seen), plain.grad)
    torch.testing.assert_close(weight.grad, plain.grad)


def test_a_hook_that_waits_for_the_sum_gets_it():
    weight, sums = made(), []
    weight.register_post_accumulate_grad_hook(lambda parameter: sums.append(parameter.grad.clone()))
    for part in range(2):
        Accumulation().run(loss(weight, part, 0))
    assert len(sums) == 2
    torch.testing.assert_close(sums[1], weight.grad)


def test_an_embedding_that_is_the_head_gets_both_gradients():
    def passed(embedding: nn.Embedding, part: int) -> Tensor:
        tokens = torch.tensor([part, 3, 3])
        hidden = torch.tanh(embedding(tokens))
        return linear_scores(hidden, embedding.weight, None, tokens, Plan(rows=2)).logp.sum()

    plain, quick = (nn.Embedding(VOCABULARY, WIDTH, _weight=made().detach()) for _ in range(2))
    quick.forward = Lookup(quick)
    single = Single()
    for part in range(3):
        passed(plain, part).backward()
        single.backward(passed(quick, part), last=part == 2)
    torch.testing.assert_close(quick.weight.grad, plain.weight.grad, rtol=0, atol=1e-6)


def test_what_is_no_parameter_or_in_no_such_pass_is_left_to_autograd():
    weight = made()
    weight.grad = torch.zeros_like(weight)
    assert begun(weight) is None
    found: list[Tensor | None] = []
    product = (weight * 2).sum()
    product.register_hook(lambda _: found.extend([begun(weight), begun(torch.zeros(1))]))
    Accumulation().run(product)
    assert found == [weight.grad, None]
