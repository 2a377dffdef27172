"""A linear head with its softmax in one autograd function: scores of N tokens without [N, V] temporaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain_plugins.training.accumulation import begun
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
from posttrain_plugins.training.processor import quick_products

CHUNK = 1 << 26
"""Bytes of the logits that are computed at a time. Each chunk reads the weight, and rewrites its gradient where
logits are computed again. At a vocabulary of 49,152 and width 256 these are 341 tokens, with which forward and
backward pass ran at 96 % of the rate of 1,024 where logits were kept, and at 93 % where they were not."""

STEP = 16
"""On a CPU the number of tokens is filled up to a multiple of this: kernels are made for each number anew."""
MEMORY = 1 << 30
"""Bytes of logits that are kept for the backward pass unless told otherwise; more, of one long example, are computed
again, a part at a time."""


@dataclass(frozen=True)
class Plan:
    """How a head is computed; it changes memory and time, and the result by rounding only.

    Args:
        tail: What follows the matrix product.
        wanted: What to compute beside log-probs.
        rows: Tokens whose logits are computed at a time.
        memory: Bytes of logits that may be kept for the backward pass. What does not fit is computed again.
    """

    tail: Tail = field(default_factory=Tail)
    wanted: Wanted = field(default_factory=Wanted)
    rows: int = 1 << 10
    memory: int = MEMORY


def choose_chunk(vocabulary: int, dtype: torch.dtype) -> int:
    """Return how many tokens' logits to compute at a time: as many as `CHUNK` bytes hold, and at least 16."""
    return max(16, CHUNK // (max(1, vocabulary) * dtype.itemsize))


def linear_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: Plan
) -> TokenScores:
    """Score tokens under softmax(tail(hidden · weightᵀ + bias)).

    Under autocast the products are computed in its type, the softmax in float32 always.

    Args:
        hidden: Shape [N, H].
        weight: Shape [V, H].
        bias: Shape [V], or None.
        targets: The tokens, shape [N].
        plan: How to compute it.
    """
    apply: Callable[..., tuple[Tensor, ...]] = LinearScores.apply
    grad, count = torch.is_grad_enabled(), len(targets)
    extra = -count % STEP if count >= STEP and hidden.device.type == "cpu" else 0
    if extra:
        hidden, targets = pad(hidden, (0, 0, 0, extra)), pad(targets, (0, extra))
    found = apply(hidden, weight, bias, targets, plan, grad)
    return plan.wanted.scores(*((each[:count] for each in found) if extra else found))


class LinearScores(torch.autograd.Function):
    """`linear_scores` with its gradient.

    A token's gradient is g · (onehot − p) where only log-probs have one: a vector that is known in the forward
    pass, times a number that is not. With a frozen weight the product of that vector with the weight is all
    that need be kept, and no logits are kept or computed twice. Otherwise that vector is kept if it fits, and
    the backward pass is two matrix products. Where entropies or squares have gradients, the logits take its
    place. What does not fit is computed again, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: Plan,
        grad: bool,
    ) -> tuple[Tensor, ...]:
        """Return `Statistics.told`, shape [N] each."""
        needs = tuple(grad and needed for needed in ctx.needs_input_grad[:3])
        dtype = compute_type(hidden, weight)
        with (
            quick_products(weight, weight.numel() * len(hidden)),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            product = Product.of(hidden, weight, bias, plan, dtype)
            stats = Statistics.empty(len(hidden), statistics_type(product.dtype), hidden.device)
            ahead = plan.wanted.linear and needs == (True, False, False)
            fits = len(hidden) * len(weight) * product.dtype.itemsize <= plan.memory
            kept = product.matrix(len(hidden)) if any(needs) and fits and not ahead else None
            pulled = torch.empty_like(product.hidden) if ahead else None
            _fill(product, stats, targets, plan, kept, pulled)
        ctx.plan, ctx.dtype, ctx.needs = plan, product.dtype, needs
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            kept,
            pulled,
            *stats.saved,
        )
        ctx.mark_non_differentiable(*stats.fixed(plan.wanted))
        ctx.set_materialize_grads(False)
        return stats.told

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, logp: Tensor | None, entropy: Tensor | None, _: Any, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, as far as they are needed."""
        pull = Pull.of(logp, entropy, *others)
        if pull is None:
            return (None,) * 6
        hidden, weight, bias, targets, kept, pulled, *measured = ctx.saved_tensors
        if pulled is not None:
            scale = -ctx.plan.tail.scale
            return ((pulled * (scale * pull.logp)[:, None]).to(hidden.dtype), *(None,) * 5)
        stats = Statistics.again(*measured)
        with (
            quick_products(weight, weight.numel() * len(hidden)),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            product = Product.of(hidden, weight, bias, ctx.plan, ctx.dtype)
            sink = Sink.of(product, ctx.needs, weight)
            _drain(product, sink, stats, targets, ctx.plan, pull, kept)
        return (*sink.gradients(hidden, weight, bias), None, None, None)


def compute_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type of the matrix products: that of autocast where it is on, else the weight's."""
    kind = hidden.device.type
    reducible = weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and reducible else weight.dtype


@dataclass(frozen=True)
class Product:
    """hidden · weightᵀ + bias in one type; the tail's scale sits on the smaller factor, where it costs nothing.

    Args:
        hidden: Scaled, shape [N, H].
        weight: Shape [V, H].
        bias: Scaled, shape [V], or None.
        cap: The tail's soft cap.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cap: float | None

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, dtype: torch.dtype
    ) -> Product:
        """Cast and scale the factors."""
        scale = plan.tail.scale
        left = hidden.to(dtype) if scale == 1 else (hidden.to(dtype) * scale)
        shift = None if bias is None else bias.to(dtype) * scale
        return cls(left.contiguous(), weight.to(dtype), shift, plan.tail.cap)

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors and the result."""
        return self.weight.dtype

    def matrix(self, rows: int) -> Tensor:
        """Make room for the logits of some tokens."""
        return self.weight.new_empty(rows, len(self.weight))

    def write(self, rows: slice, out: Tensor) -> None:
        """Write the uncapped logits of some tokens to `out`, shape [R, V]."""
        if self.bias is None:
            torch.mm(self.hidden[rows], self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)

    def capped(self, raw: Tensor, out: Tensor, spare: bool = True) -> Tensor:
        """Return a block of `raw` logits, capped and in the statistics' type.

        Args:
            raw: Shape [R, V].
            out: Takes the result where it is not `raw` itself.
            spare: Never return `raw` itself when false.
        """
        if self.cap is not None:
            return out.copy_(raw).div_(self.cap).tanh_().mul_(self.cap)
        return raw if spare and raw.dtype == out.dtype else out.copy_(raw)


@dataclass(frozen=True)
class Sink:
    """Where gradients add up; None where none is needed.

    Args:
        product: What they are the gradients of.
        hidden: Of the hidden states.
        weight: Of the weight.
        bias: Of the bias.
        begun: The weight's is that of the micro-batches before this one, too; autograd has nothing to add.
    """

    product: Product
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    begun: bool

    @classmethod
    def of(cls, product: Product, needs: tuple[bool, ...], weight: Tensor) -> Sink:
        """Make room for the gradients that are needed; that of the weight adds up in the weight's own type."""
        hidden = torch.empty_like(product.hidden) if needs[0] else None
        bias = torch.zeros_like(product.bias) if needs[2] and product.bias is not None else None
        total = earlier = begun(weight) if needs[1] else None
        if needs[1] and earlier is None:
            # The first product overwrites it, so only without tokens must it be zero from the start.
            room = torch.empty if len(product.hidden) else torch.zeros
            total = room(weight.shape, dtype=weight.dtype, device=weight.device)
        return cls(product, hidden, total, bias, earlier is not None)

    def add(self, rows: slice, block: Tensor, factor: Tensor | None, scale: float) -> None:
        """Take in the gradient `factor · block` of some tokens' scaled logits.

        Args:
            rows: Which tokens; the first comes first.
            block: Shape [R, V].
            factor: Shape [R], or None for 1: it meets the smaller factor of each product.
            scale: The tail's.
        """
        factor = block.new_ones(len(block)) if factor is None else factor.to(block.dtype)
        if self.hidden is not None:
            torch.mm(block, self.product.weight, out=self.hidden[rows])
            self.hidden[rows] *= scale * factor[:, None]
        if self.bias is not None:
            self.bias.addmv_(block.t(), factor, alpha=scale)
        if self.weight is None:
            return
        left = self.product.hidden[rows] * factor[:, None]
        first = rows.start == 0 and not self.begun
        if self.weight.dtype == block.dtype:
            self.weight.addmm_(block.t(), left, beta=0 if first else 1)
        elif first:
            self.weight.copy_(block.t() @ left)
        else:
            self.weight.add_(block.t() @ left)

    def gradients(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, in their types."""
        sums = (self.hidden, None if self.begun else self.weight, self.bias)
        return tuple(
            None if total is None or given is None else total.to(given.dtype)
            for total, given in zip(sums, inputs, strict=True)
        )


def _fill(
    product: Product,
    stats: Statistics,
    targets: Tensor,
    plan: Plan,
    kept: Tensor | None,
    pulled: Tensor | None,
) -> None:
    """Compute all statistics, and what the backward pass is left with: `kept` [N, V] or `pulled` [N, H]."""
    units, count = plan.wanted.linear and (kept is not None or pulled is not None), len(targets)
    size, block = min(plan.rows, count), block_rows(len(product.weight), targets.device)
    # What is kept is computed in its own place: logits, or unit gradients that overwrite them block by block.
    room = product.matrix(size) if kept is None else kept
    blank = product.weight.new_empty(min(block, size), len(product.weight), dtype=stats.logp.dtype)
    second = torch.empty_like(blank)
    for rows in pieces(count, size):
        raw = room[rows] if room is kept else room[: rows.stop - rows.start]
        product.write(rows, raw)
        for part in pieces(len(raw), block):
            tokens = slice(rows.start + part.start, rows.start + part.stop)
            direct = units and raw.dtype == blank.dtype
            logits = product.capped(raw[part], blank[: part.stop - part.start], spare=not direct)
            probs = raw[part] if direct else second[: len(logits)]
            own = stats.rows(tokens)
            own.measure(logits, targets[tokens], plan.wanted, probs)
            if units:
                unit_gradient(logits, probs, own, targets[tokens], product.cap)
            if units and not direct:
                raw[part] = probs
        if pulled is not None:
            torch.mm(raw, product.weight, out=pulled[rows])


def _drain(
    product: Product,
    sink: Sink,
    stats: Statistics,
    targets: Tensor,
    plan: Plan,
    pull: Pull,
    kept: Tensor | None,
) -> None:
    """Add up the gradients, from what was kept or from logits that are computed again."""
    count, scale = len(targets), plan.tail.scale
    if plan.wanted.linear and kept is not None:
        if count:
            sink.add(slice(0, count), kept, -pull.logp, scale)
        return
    size, block = min(plan.rows, count), block_rows(len(product.weight), targets.device)
    chunk = product.matrix(size)
    blank = product.weight.new_empty(min(block, size), len(product.weight), dtype=stats.logp.dtype)
    second = torch.empty_like(blank)
    for rows in pieces(count, size):
        out = chunk[: rows.stop - rows.start]
        if kept is None:
            product.write(rows, out)
        raw = out if kept is None else kept[rows]
        for part in pieces(len(raw), block):
            tokens = slice(rows.start + part.start, rows.start + part.stop)
            length = part.stop - part.start
            logits = product.capped(raw[part], blank[:length], spare=kept is None)
            probs, own = torch.softmax(logits, -1, out=second[:length]), stats.rows(tokens)
            if pull.linear:
                unit_gradient(logits, probs, own, targets[tokens], product.cap)
            else:
                gradient(logits, probs, own, targets[tokens], pull.rows(tokens), product.cap)
            out[part] = probs
        sink.add(rows, out, -pull.logp[rows] if pull.linear else None, scale)
