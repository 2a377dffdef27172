"""Backward passes that add the head's gradient to what the weight has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posttrain_plugins.training.accumulation import Accumulation, begun
from posttrain_plugins.training.head import Plan, linear_scores

MEMORY = pytest.mark.parametrize("memory", [0, 1 << 20], ids=["computed again", "kept"])


def loss(weight: Tensor, part: int, memory: int) -> Tensor:
    """Return what a micro-batch of five tokens comes to, its chunks three tokens long."""
    generator = torch.Generator().manual_seed(part)
    hidden = torch.randn(5, 4, generator=generator)
    targets = torch.randint(11, (5,), generator=generator)
    return linear_scores(hidden, weight, None, targets, Plan(rows=3, memory=memory)).logp.sum()


def made() -> nn.Parameter:
    return nn.Parameter(torch.randn(11, 4, generator=torch.Generator().manual_seed(9)))


@MEMORY
def test_micro_batches_add_up_in_place(memory: int):
    plain, weight = made(), made()
    for part in range(3):
        loss(plain, part, memory).backward()
        Accumulation().run(loss(weight, part, memory))
        if part == 0:
            first = weight.grad
    assert weight.grad is first, "the gradient of the first micro-batch is the room of all"
    torch.testing.assert_close(weight.grad, plain.grad, rtol=0, atol=1e-6)


@MEMORY
def test_a_hook_on_the_weight_gets_each_gradient(memory: int):
    plain, weight = made(), made()
    seen: list[Tensor] = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for part in range(2):
        loss(plain, part, memory).backward()
        Accumulation().run(loss(weight, part, memory))
    torch.testing.assert_close(sum(seen), plain.grad)
    torch.testing.assert_close(weight.grad, plain.grad)


def test_a_hook_that_waits_for_the_sum_gets_it():
    weight, sums = made(), []
    weight.register_post_accumulate_grad_hook(lambda parameter: sums.append(parameter.grad.clone()))
    for part in range(2):
        Accumulation().run(loss(weight, part, 0))
    assert len(sums) == 2
    torch.testing.assert_close(sums[1], weight.grad)


def test_what_is_no_parameter_or_in_no_such_pass_is_left_to_autograd():
    weight = made()
    weight.grad = torch.zeros_like(weight)
    assert begun(weight) is None
    found: list[Tensor | None] = []
    product = (weight * 2).sum()
    product.register_hook(lambda _: found.extend([begun(weight), begun(torch.zeros(1))]))
    Accumulation().run(product)
    assert found == [weight.grad, None]
