"""Making a CPU multiply float32 matrices as fast as it can, without giving up a bit of float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WORTHWHILE = 1 << 24
"""Multiply-adds of a product below which oneDNN's 0.3 ms for setting up each new shape cost more than it saves."""

_QUICK = "bf16"
_onednn: Any = torch.backends.mkldnn
"""The object that torch puts in the place of the module of this name; it has more than that."""


@contextmanager
def quick_products(like: Tensor, work: int) -> Iterator[None]:
    """Let oneDNN rather than MKL multiply float32 matrices on the CPU, where that is exact and pays.

    On AVX-512 machines that MKL was not tuned for, oneDNN is twice as fast (450 instead of 215 GFLOP/s at
    2048³ with two threads). PyTorch reaches it for float32 only through the setting that allows bfloat16
    inside of products. A processor without AMX has no use for that permission: the kernel that is chosen
    computes in float32. That is tried before it is relied upon (`keeps_float32`).

    Args:
        like: A factor of the products.
        work: Multiply-adds of a typical one.
    """
    fitting = like.device.type == "cpu" and like.dtype == torch.float32
    if work < WORTHWHILE or not fitting or not keeps_float32():
        yield
        return
    with _allowing():
        yield


@functools.cache
def keeps_float32() -> bool:
    """Tell whether oneDNN's float32 products are exact here although they need not be."""
    found = torch.cpu.get_capabilities()
    # AMX is the unit that would multiply in bfloat16; without AVX-512 nothing is gained.
    if not found.get("avx512_f") or any(has for name, has in found.items() if name.startswith("amx")):
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    with torch.no_grad(), _allowing():
        return all(_exact(*shape) for shape in ((8, 64, 512), (64, 256, 300), (300, 33, 1024)))


def with_plain_products(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function whose own small products are not to go through oneDNN, in the backward pass neither.

    The CPU's attention kernel multiplies tile by tile: hundreds of small products, for which oneDNN's set-up costs
    several times what they take.

    Args:
        compute: Takes `inputs` and returns one tensor; both its passes are computed in one piece.
        inputs: Tensors, with or without gradient.
    """
    if _onednn.matmul.fp32_precision != _QUICK:
        return compute(*inputs)
    enter: Callable[..., Any] = _Plain.apply
    leave: Callable[..., Any] = _Quick.apply
    result: Tensor = leave(compute(*enter(*inputs)))
    return result


class _Plain(torch.autograd.Function):
    """The identity: plain products follow it in the forward pass, and precede it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        _onednn.matmul.fp32_precision = _plain_setting
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        _onednn.matmul.fp32_precision = _QUICK
        return gradients


class _Quick(torch.autograd.Function):
    """The identity: plain products precede it in the forward pass, and follow it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        _onednn.matmul.fp32_precision = _QUICK
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _onednn.matmul.fp32_precision = _plain_setting
        return gradient


_plain_setting = _onednn.matmul.fp32_precision
"""What torch has unless it is told otherwise."""


@contextmanager
def _allowing() -> Iterator[None]:
    before = _onednn.matmul.fp32_precision
    _onednn.matmul.fp32_precision = _QUICK
    try:
        yield
    finally:
        _onednn.matmul.fp32_precision = before


def _exact(rows: int, inner: int, columns: int) -> bool:
    """Multiply by a selection: each result is one 21-bit entry, of which bfloat16 would keep eight bits."""
    generator = torch.Generator().manual_seed(rows)
    left = torch.randint(-(1 << 20), 1 << 20, (rows, inner), generator=generator).float()
    chosen = torch.randint(inner, (columns,), generator=generator)
    right = torch.nn.functional.one_hot(chosen, inner).float()
    expected = left[:, chosen]
    products = (left @ right.t(), (right @ left.t()).t(), torch.zeros_like(expected).addmm_(left, right.t()))
    return all(torch.equal(product, expected) for product in products)
