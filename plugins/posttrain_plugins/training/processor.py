"""Making a CPU multiply float32 matrices as fast as it can, without giving up a bit of float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WORTHWHILE = 1 << 26
"""Multiply-adds of a product below which oneDNN's 0.3 ms for setting up each new shape cost more than it saves."""


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


@contextmanager
def _allowing() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def _exact(rows: int, inner: int, columns: int) -> bool:
    """Multiply by a selection: each result is one 21-bit entry, of which bfloat16 would keep eight bits."""
    generator = torch.Generator().manual_seed(rows)
    left = torch.randint(-(1 << 20), 1 << 20, (rows, inner), generator=generator).float()
    chosen = torch.randint(inner, (columns,), generator=generator)
    right = torch.nn.functional.one_hot(chosen, inner).float()
    expected = left[:, chosen]
    products = (left @ right.t(), (right @ left.t()).t(), torch.zeros_like(expected).addmm_(left, right.t()))
    return all(torch.equal(product, expected) for product in products)
