"""Faster products and reused memory on a CPU."""

from __future__ import annotations

import pytest
import torch

from posttrain_plugins.training import processor
from posttrain_plugins.training.processor import (
    WORTHWHILE,
    keeps_float32,
    quick_products,
    with_plain_products,
)


def setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


def test_products_stay_float32_and_the_setting_is_put_back() -> None:
    before = setting()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2048, 64, generator=generator)
    hidden = torch.randn(WORTHWHILE // (2048 * 64), 64, generator=generator)
    with quick_products(weight, weight.numel() * len(hidden)):
        found = hidden @ weight.t()
        assert (setting() == "bf16") is keeps_float32()
    assert setting() == before
    exact = hidden.double() @ weight.double().t()
    # float32 is off by about 1e-5 here, bfloat16 by about 1e-1
    assert (found - exact).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (WORTHWHILE, torch.bfloat16)])
def test_nothing_changes_where_it_would_not_pay(rows: int, dtype: torch.dtype) -> None:
    before = setting()
    with quick_products(torch.zeros(4, 4, dtype=dtype), 16 * rows):
        assert setting() == before


@pytest.mark.parametrize("missing", [{"avx512_f": False}, {"avx512_f": True, "amx_bf16": True}], ids=str)
def test_a_processor_that_would_round_or_gain_nothing_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, bool]
) -> None:
    keeps_float32.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: missing)
    try:
        assert not keeps_float32()
    finally:
        keeps_float32.cache_clear()


def test_the_setting_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "keeps_float32", lambda: True)
    before = setting()
    with pytest.raises(KeyError), quick_products(torch.zeros(1, 1), WORTHWHILE):
        raise KeyError
    assert setting() == before


def test_what_multiplies_in_small_tiles_is_exempt_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "keeps_float32", lambda: True)
    plain, seen = setting(), []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, one, other):
            seen.append(("inside", setting()))
            return one * other

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("inside, back", setting()))
            return gradient, gradient

    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            seen.append(("around", setting()))
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("around, back", setting()))
            return gradient

    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with quick_products(one.detach(), WORTHWHILE):
        result = Around.apply(with_plain_products(Spy.apply, Around.apply(one), Around.apply(other)))
        result.sum().backward()
    assert {name for name, value in seen if value == "bf16"} == {"around", "around, back"}
    assert {name for name, value in seen if value == plain} == {"inside", "inside, back"}
    assert one.grad.tolist() == [1.0] * 3 and setting() == plain


def test_outside_of_quick_products_nothing_is_added() -> None:
    one = torch.ones(3, requires_grad=True)
    assert type(with_plain_products(lambda value: value * 2, one).grad_fn).__name__ == "MulBackward0"
