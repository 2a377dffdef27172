"""A linear head fused with its softmax: values, gradients, memory plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain_plugins.training.head import Plan, Tail, TokenScores, Wanted, linear_scores, logit_scores
from posttrain_plugins.training.head import statistics as blocks

EVERYTHING = Wanted(entropy=True, entropy_gradient=True, top1=True, squares=True, mean_logp=True)
LOGP = Wanted(entropy=True, top1=True)
TAILS = [Tail(), Tail(scale=0.5), Tail(cap=2.0), Tail(3.0, 1.5)]
MEMORIES = pytest.mark.parametrize("memory", [0, 1 << 30], ids=["recomputed", "kept"])


def parts(tokens: int = 7, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight, bias = drawn(tokens, width), drawn(vocabulary, width), drawn(vocabulary)
    return hidden, weight, bias, torch.randint(vocabulary, (tokens,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tail: Tail) -> TokenScores:
    logits = tail(torch.nn.functional.linear(hidden, weight, bias))
    everything = logits.log_softmax(-1)
    probs = everything.exp()
    logp = everything.gather(1, targets[:, None])[:, 0]
    entropy = -(probs * everything).sum(-1)
    squares, mean = probs.square().sum(-1), everything.mean(-1)
    return TokenScores(logp, entropy, logits.argmax(-1) == targets, squares, mean_logp=mean)


def assert_equal(found: TokenScores, expected: TokenScores) -> None:
    torch.testing.assert_close(found.logp, expected.logp)
    torch.testing.assert_close(found.entropy, expected.entropy)
    assert found.top1.tolist() == expected.top1.tolist()
    torch.testing.assert_close(found.squares, expected.squares)
    torch.testing.assert_close(found.mean_logp, expected.mean_logp)


def test_worked_out_by_hand() -> None:
    # hidden · weightᵀ = (ln 1, ln 3): p = (1/4, 3/4), H = ln 4 − 3/4 ln 3, Σp² = 10/16
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1.0], [3.0]]).log()
    found = linear_scores(hidden, weight, None, torch.tensor([0]), Plan(wanted=EVERYTHING))
    assert found.logp.exp().item() == pytest.approx(0.25)
    assert found.entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert found.squares.item() == pytest.approx(0.625)
    assert found.mean_logp.item() == pytest.approx((math.log(0.25) + math.log(0.75)) / 2)
    assert found.top1.item() is False


def test_gradient_worked_out_by_hand() -> None:
    # ∂ log p(0) / ∂z = (1 − 1/4, −3/4), and z = weight · 1
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [3.0]]).log().requires_grad_()
    linear_scores(hidden, weight, None, torch.tensor([0]), Plan()).logp.sum().backward()
    assert weight.grad.flatten().tolist() == pytest.approx([0.75, -0.75])
    assert hidden.grad.item() == pytest.approx(-0.75 * math.log(3))


@pytest.mark.parametrize("tail", TAILS)
@MEMORIES
def test_values_equal_the_plain_ones(tail: Tail, memory: int) -> None:
    given = parts()
    found = linear_scores(*given, Plan(tail, EVERYTHING, 3, memory))
    assert_equal(found, plain(*given, tail))


@pytest.mark.parametrize("wanted", [LOGP, EVERYTHING], ids=["logp", "everything"])
@pytest.mark.parametrize("tail", TAILS)
@MEMORIES
def test_gradients_are_those_of_the_values(tail: Tail, wanted: Wanted, memory: int) -> None:
    *factors, targets = parts()
    plan = Plan(tail, wanted, 3, memory)

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = linear_scores(hidden, weight, bias, targets, plan)
        return (
            (found.logp,) if wanted is LOGP else (found.logp, found.entropy, found.squares, found.mean_logp)
        )

    assert torch.autograd.gradcheck(scores, tuple(factors))


@pytest.mark.parametrize("frozen", [(1,), (1, 2), (0,), (0, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("tail", [TAILS[0], TAILS[3]])
@pytest.mark.parametrize("wanted", [LOGP, EVERYTHING], ids=["logp", "everything"])
@MEMORIES
def test_frozen_inputs_get_no_gradient_and_change_no_other(
    frozen: tuple[int, ...], tail: Tail, wanted: Wanted, memory: int
) -> None:
    *factors, targets = parts()
    for index in frozen:
        factors[index].requires_grad_(False)
    pull = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    trained = [factor for factor in factors if factor.requires_grad]
    found = linear_scores(*factors, targets, Plan(tail, wanted, 3, memory))
    expected = plain(*factors, targets, tail)
    gradients = torch.autograd.grad((found.logp * pull).sum(), trained)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected.logp * pull).sum(), trained))


@MEMORIES
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_neither_chunks_nor_blocks_change_anything(
    monkeypatch: pytest.MonkeyPatch, memory: int, block: int
) -> None:
    monkeypatch.setitem(blocks.SCRATCH, "cpu", block)
    hidden, weight, bias, targets = parts(tokens=10, dtype=torch.float32)
    pull = torch.linspace(-1, 2, 10)

    def run(plan: Plan) -> tuple[Tensor, ...]:
        found = linear_scores(hidden, weight, bias, targets, plan)
        total = ((found.logp + found.entropy - found.squares + found.mean_logp) * pull).sum()
        return found.logp, *torch.autograd.grad(total, (hidden, weight, bias))

    whole = run(Plan(wanted=EVERYTHING))
    for rows in (1, 3, 10, 1000):
        torch.testing.assert_close(run(Plan(Tail(), EVERYTHING, rows, memory)), whole)


@MEMORIES
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wanted", [LOGP, EVERYTHING], ids=["logp", "everything"])
def test_no_tokens_give_gradients_of_zero(memory: int, frozen: bool, wanted: Wanted) -> None:
    hidden, weight, bias, targets = parts(tokens=0, dtype=torch.float32)
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    found = linear_scores(hidden, weight, bias, targets, Plan(Tail(2.0, 3.0), wanted, 4, memory))
    assert found.logp.shape == found.entropy.shape == found.top1.shape == (0,)
    found.logp.sum().backward()
    assert hidden.grad.shape == (0, 5)
    if not frozen:
        assert weight.grad.abs().sum() == 0 and bias.grad.abs().sum() == 0
        assert weight.grad.isfinite().all()


def test_hidden_states_need_not_be_contiguous() -> None:
    hidden, weight, bias, targets = parts()
    apart = torch.stack([hidden.detach(), hidden.detach() * 2], -1)[..., 0].requires_grad_()
    assert not apart.is_contiguous()
    for given in (hidden, apart):
        linear_scores(given, weight, bias, targets, Plan()).logp.sum().backward()
    torch.testing.assert_close(apart.grad, hidden.grad)


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        found = linear_scores(*parts(), Plan(wanted=EVERYTHING))
    assert not found.logp.requires_grad
    assert_equal(found, plain(*parts(), Tail()))


def test_what_is_not_to_have_a_gradient_has_none() -> None:
    found = linear_scores(*parts(), Plan(wanted=LOGP))
    assert found.logp.requires_grad and not found.entropy.requires_grad and found.squares is None
    nothing = linear_scores(*parts(), Plan())
    assert nothing.entropy.abs().sum() == 0 and not nothing.top1.any()


def test_a_graph_can_be_gone_through_twice() -> None:
    hidden, weight, bias, targets = parts()
    found = linear_scores(hidden, weight, bias, targets, Plan(wanted=EVERYTHING))
    total = (found.logp + found.entropy + found.squares + found.mean_logp).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, (hidden, weight)), first, rtol=0, atol=0)


def test_deterministic_algorithms_suffice() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        hidden, weight, bias, targets = parts()
        found = linear_scores(hidden, weight, bias, targets, Plan(wanted=EVERYTHING))
        (found.logp + found.squares).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert weight.grad.isfinite().all()


def test_gradient_checkpointing_around_it() -> None:
    hidden, weight, bias, targets = parts()

    def body(rows: Tensor) -> Tensor:
        return linear_scores(rows.tanh(), weight, bias, targets, Plan()).logp

    expected = torch.autograd.grad(body(hidden).sum(), (hidden, weight))
    again = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), (hidden, weight)), expected)


@MEMORIES
def test_bfloat16_is_reduced_in_float32(memory: int) -> None:
    given = parts(40, 32, 500, torch.bfloat16)
    found = linear_scores(*given, Plan(Tail(), LOGP, 16, memory))
    assert found.logp.dtype == torch.float32
    wide = [factor.detach().float().requires_grad_() for factor in given[:3]]
    expected = plain(*wide, given[3], Tail())
    # A logit of 30 is known to 1/16 in bfloat16.
    torch.testing.assert_close(found.logp, expected.logp, atol=0.2, rtol=0.01)
    gradients = torch.autograd.grad(found.logp.mean(), given[:3])
    for got, want in zip(gradients, torch.autograd.grad(expected.logp.mean(), wide), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - want).norm() <= 0.03 * want.norm()


def test_a_confident_bfloat16_head_keeps_its_small_gradient() -> None:
    # p(y) rounds to 1 in bfloat16; 1 − p = e⁻⁸ / (1 + e⁻⁸) must not.
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    linear_scores(hidden, weight, None, torch.tensor([0]), Plan()).logp.sum().backward()
    assert hidden.grad.item() == pytest.approx(math.exp(-8) / (1 + math.exp(-8)), rel=0.01)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_autocast_multiplies_in_its_type_and_returns_gradients_in_the_weights(memory: int) -> None:
    hidden, weight, bias, targets = parts(40, 32, 500, torch.float32)
    plan = Plan(Tail(), LOGP, 16, memory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_scores(hidden, weight, bias, targets, plan)
    narrow = [factor.detach().bfloat16() for factor in (hidden, weight, bias)]
    assert torch.equal(found.logp, linear_scores(*narrow, targets, plan).logp)
    gradients = torch.autograd.grad(found.logp.mean(), (hidden, weight, bias))
    exact = plain(hidden, weight, bias, targets, Tail()).logp.mean()
    for got, want in zip(gradients, torch.autograd.grad(exact, (hidden, weight, bias)), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 0.03 * want.norm()


def test_unlikely_tokens_are_exact_where_their_probability_is_none() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [300.0]])
    found = linear_scores(hidden, weight, None, torch.tensor([0]), Plan(wanted=LOGP))
    assert found.logp.item() == -300
    assert found.entropy.item() == 0


# Logits that a model made itself


@pytest.mark.parametrize("tail", TAILS)
def test_logits_give_the_same_as_the_factors(tail: Tail) -> None:
    hidden, weight, bias, targets = parts()
    logits = torch.nn.functional.linear(hidden, weight, bias).detach().requires_grad_()
    assert_equal(logit_scores(logits, targets, EVERYTHING, tail), plain(hidden, weight, bias, targets, tail))

    def scores(raw: Tensor) -> tuple[Tensor, ...]:
        found = logit_scores(raw, targets, EVERYTHING, tail)
        return found.logp, found.entropy, found.squares, found.mean_logp

    assert torch.autograd.gradcheck(scores, (logits,))


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    logit_scores(logits, torch.tensor([0, 1, 2]), EVERYTHING).logp.sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("wanted", [LOGP, EVERYTHING], ids=["logp", "everything"])
def test_impossible_tokens_give_no_nan(wanted: Wanted) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    found = logit_scores(logits, torch.tensor([0]), wanted)
    assert found.entropy.item() == pytest.approx(math.log(2))
    total = found.logp.sum() + (found.entropy.sum() if wanted.entropy_gradient else 0)
    total.backward()
    assert logits.grad.isfinite().all()


def test_a_loss_of_one_value_alone_is_enough() -> None:
    hidden, weight, bias, targets = parts()
    read: list[Callable[[TokenScores], Tensor]] = [
        lambda found: found.entropy,
        lambda found: found.squares,
        lambda found: found.mean_logp,
    ]
    for value in read:
        found = value(linear_scores(hidden, weight, bias, targets, Plan(wanted=EVERYTHING)))
        expected = value(plain(hidden, weight, bias, targets, Tail()))
        gradients = torch.autograd.grad(found.sum(), (hidden, weight, bias))
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (hidden, weight, bias)))


def test_memory_decides_whether_logits_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain_plugins.training.head import fused

    products: list[int] = []
    write = fused.Product.write
    monkeypatch.setattr(
        fused.Product, "write", lambda own, rows, out: (products.append(len(out)), write(own, rows, out))[1]
    )
    hidden, weight, bias, targets = parts(tokens=10)
    needed = 10 * 11 * 8
    for memory, again in ((needed, 0), (needed - 1, 10)):
        products.clear()
        plan = replace(Plan(rows=4), memory=memory)
        linear_scores(hidden, weight, bias, targets, plan).logp.sum().backward()
        assert sum(products) == 10 + again
    products.clear()
    frozen = (weight.detach(), bias.detach())
    linear_scores(hidden, *frozen, targets, Plan(rows=4, memory=0)).logp.sum().backward()
    assert sum(products) == 10
