"""Embeddings whose gradient is added row by row, without a dense matrix that is zero but for a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from posttrain_plugins.training.accumulation import under_way


class Lookup:
    """Takes the place of the forward pass of an `nn.Embedding` on a CPU.

    Torch makes a dense gradient of an embedding, all zeros but for the rows that were looked up, and adds it to that of
    the head where both are one matrix. With a large vocabulary this writes and reads more than the rest of the body's
    backward pass. In an `Accumulation` the rows are added to the weight's gradient instead; in any other backward pass
    the gradient is torch's own.

    Args:
        module: The embedding; nothing about it changes but where its gradient is added.
    """

    def __init__(self, module: nn.Embedding) -> None:
        self.module, self.padding = module, module.padding_idx

    @staticmethod
    def fits(module: Any) -> bool:
        """Tell whether a module is an ordinary embedding with its weight on a CPU."""
        return (
            type(module) is nn.Embedding
            and type(module.weight) is nn.Parameter
            and module.weight.device.type == "cpu"
            and module.max_norm is None
            and not module.scale_grad_by_freq
            and not module.sparse
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look tokens of shape [...] up: [..., H]."""
        found: Tensor = _Rows.apply(self.module.weight, tokens, self)  # type: ignore[no-untyped-call]
        return found

    def add(self, tokens: Tensor, rows: Tensor) -> None:
        """Add the gradient of the rows of some tokens to the weight's."""
        weight = self.module.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        rows = rows.reshape(-1, rows.shape[-1]).to(weight.dtype)
        if self.padding is not None:
            rows = rows.masked_fill((tokens.reshape(-1, 1) == self.padding), 0)
        weight.grad.index_add_(0, tokens.reshape(-1), rows)


class _Rows(torch.autograd.Function):
    """An embedding whose gradient is that of the rows that were looked up."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, owner: Lookup) -> Tensor:
        """Look the tokens up."""
        ctx.owner, ctx.shape = owner, weight.shape
        ctx.save_for_backward(tokens)
        return embedding(tokens, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, None, None]:
        """Have the rows added afterwards; return a dense gradient where nobody would add them."""
        (tokens,) = ctx.saved_tensors
        owner = ctx.owner
        accumulation = under_way(owner.module.weight)
        if accumulation is not None:
            accumulation.after(lambda: owner.add(tokens, rows))
            return None, None, None
        padding = -1 if owner.padding is None else owner.padding
        dense = torch.ops.aten.embedding_dense_backward(rows, tokens, ctx.shape[0], padding, False)
        return dense, None, None
