"""Scores of tokens from logits that a model made itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posttrain_plugins.training.head.scores import Tail, TokenScores, Wanted
from posttrain_plugins.training.head.statistics import (
    Pull,
    Statistics,
    block_rows,
    gradient,
    pieces,
    statistics_type,
    unit_gradient,
)


def logit_scores(raw: Tensor, targets: Tensor, wanted: Wanted, tail: Tail | None = None) -> TokenScores:
    """Score tokens under softmax(tail(raw)).

    Args:
        raw: What a head put out, shape [N, V].
        targets: The tokens, shape [N].
        wanted: What to compute beside log-probs.
        tail: What follows the head; nothing unless given.
    """
    apply: Callable[..., tuple[Tensor, ...]] = LogitScores.apply
    return wanted.scores(*apply(raw, targets, wanted, tail or Tail()))


class LogitScores(torch.autograd.Function):
    """`logit_scores` with its gradient: the backward pass holds one tensor of the logits' size and no more."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, targets: Tensor, wanted: Wanted, tail: Tail) -> tuple[Tensor, ...]:
        """Return `Statistics.told`, shape [N] each."""
        stats = Statistics.empty(len(raw), statistics_type(raw.dtype), raw.device)
        for rows in pieces(len(raw), block_rows(raw.shape[-1], raw.device)):
            logits = _tailed(raw[rows], tail, stats.logp.dtype)
            stats.rows(rows).measure(logits, targets[rows], wanted, torch.empty_like(logits))
        ctx.tail = tail
        ctx.save_for_backward(raw, targets, *stats.saved)
        ctx.mark_non_differentiable(*stats.fixed(wanted))
        ctx.set_materialize_grads(False)
        return stats.told

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, logp: Tensor | None, entropy: Tensor | None, _: Any, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, shape [N, V]."""
        pull = Pull.of(logp, entropy, *others)
        if pull is None:
            return (None,) * 4
        raw, targets, *measured = ctx.saved_tensors
        stats = Statistics.again(*measured)
        out = torch.empty_like(raw)
        for rows in pieces(len(raw), block_rows(raw.shape[-1], raw.device)):
            logits = _tailed(raw[rows], ctx.tail, stats.logp.dtype)
            probs, own, part = torch.softmax(logits, -1), stats.rows(rows), pull.rows(rows)
            if pull.linear:
                unit_gradient(logits, probs, own, targets[rows], ctx.tail.cap)
                probs.mul_(-part.logp[:, None])
            else:
                gradient(logits, probs, own, targets[rows], part, ctx.tail.cap)
            out[rows] = probs.mul_(ctx.tail.scale)
        return out, None, None, None


def _tailed(raw: Tensor, tail: Tail, dtype: torch.dtype) -> Tensor:
    """Return a copy of a block of logits with the tail applied."""
    logits = raw.to(dtype, copy=True)
    if tail.scale != 1:
        logits.mul_(tail.scale)
    return logits if tail.cap is None else logits.div_(tail.cap).tanh_().mul_(tail.cap)
