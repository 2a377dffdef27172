"""A frozen linear layer with weights in 8 bits and everything else as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.nn import Int8Params, Linear8bitLt
from torch import Tensor


class Linear8bit(Linear8bitLt):
    """bitsandbytes' layer with another product: W = int8 · scale / 127 is made whole for it and forgotten again.

    Its own product rounds inputs to 8 bits by the largest of each row, and keeps columns whole in which any row of
    the batch has an outlier (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339).
    """

    weight: Int8Params

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias, in the precision that is asked for around it."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        multiply: Callable[..., Tensor] = _Product.apply
        product = multiply(x.to(dtype), self.weight.data, self._scale())
        return product if self.bias is None else product + self.bias.to(dtype)

    def _scale(self) -> Tensor:
        scale = self.state.SCB if self.weight.SCB is None else self.weight.SCB
        assert scale is not None, "the weights are quantized when they are loaded"
        return scale.to(self.weight.device)


class _Product(torch.autograd.Function):
    """x Wᵀ with frozen W; the backward pass makes W whole again instead of keeping it."""

    @staticmethod
    def forward(context: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(codes, scale)
        return torch.nn.functional.linear(x, _whole(codes, scale, x.dtype))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        codes, scale = context.saved_tensors
        return gradient @ _whole(codes, scale, gradient.dtype), None, None


def _whole(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights, shape [outputs, inputs]; `scale` has the largest value of each row."""
    return (codes.float() * (scale.float() / 127)[:, None]).to(dtype)
