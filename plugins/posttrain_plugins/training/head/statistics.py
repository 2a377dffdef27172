"""The softmax of blocks of logits: what is read off it and how gradients go back through it.

With p = softmax(z) over V tokens, token y, H = −Σ p log p, S = Σ p² and M = Σ log p / V:
∂ log p(y) / ∂z = onehot(y) − p,  ∂H/∂z = −p (log p + H),  ∂S/∂z = 2 p (p − S),  ∂M/∂z = 1/V − p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from posttrain_plugins.training.head.scores import Wanted

SCRATCH = {"cpu": 1 << 21, "other": 1 << 28}
"""Bytes of a block of float32 logits. On a CPU the passes over one block should find it in the cache; elsewhere a
kernel should have enough to do."""

LOWEST = -1e30
"""Stands in for −∞, which times a probability of 0 would not be 0."""


@dataclass(frozen=True)
class Statistics:
    """Per token, shape [N] each, in the statistics' type.

    Args:
        logp: log p(y).
        log_z: log Σ exp(z).
        entropy: Zeros unless wanted.
        top1: Whether z(y) is the largest; False unless wanted.
        squares: Σ p²; zeros unless wanted.
        mean_logp: Σ log p / V; zeros unless wanted.
    """

    logp: Tensor
    log_z: Tensor
    entropy: Tensor
    top1: Tensor
    squares: Tensor
    mean_logp: Tensor

    @classmethod
    def empty(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> Statistics:
        """Make room for some tokens."""
        numbers = [torch.zeros(tokens, dtype=dtype, device=device) for _ in range(5)]
        flags = torch.zeros(tokens, dtype=torch.bool, device=device)
        return cls(numbers[0], numbers[1], numbers[2], flags, numbers[3], numbers[4])

    @classmethod
    def again(cls, logp: Tensor, log_z: Tensor, entropy: Tensor, squares: Tensor) -> Statistics:
        """Put together what a forward pass saved for its backward pass, which asks for no top-1 and no mean."""
        return cls(
            logp, log_z, entropy, torch.empty_like(log_z, dtype=torch.bool), squares, torch.empty_like(log_z)
        )

    @property
    def told(self) -> tuple[Tensor, ...]:
        """What `Wanted.scores` takes."""
        return self.logp, self.entropy, self.top1, self.squares, self.mean_logp

    @property
    def saved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `again` takes."""
        return self.logp, self.log_z, self.entropy, self.squares

    def fixed(self, wanted: Wanted) -> list[Tensor]:
        """Return what no gradient flows from."""
        fixed = [self.top1]
        fixed += [] if wanted.entropy_gradient else [self.entropy]
        fixed += [] if wanted.squares else [self.squares]
        return fixed + ([] if wanted.mean_logp else [self.mean_logp])

    def rows(self, chosen: slice) -> Statistics:
        """Return views of some tokens' values."""
        return Statistics(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def measure(self, logits: Tensor, targets: Tensor, wanted: Wanted, out: Tensor) -> None:
        """Fill in the values of a block of tokens.

        Args:
            logits: Shape [R, V], in the statistics' type.
            targets: Shape [R].
            wanted: What to compute.
            out: Takes the probabilities, shape [R, V]; not the logits' own memory.
        """
        top = logits.amax(-1)
        chosen = logits.gather(1, targets[:, None])[:, 0]
        # One kernel does what amax, subtraction, exp, sum and division do in five passes.
        torch.softmax(logits, -1, out=out)
        # The largest probability is never below 1/V, so log Σ exp(z − top) is read off without loss.
        log_top = out.amax(-1).log_()
        # z(y) − top is exact to its own size where z(y) − log_z would be to the size of z.
        torch.add(chosen - top, log_top, out=self.logp)
        torch.sub(top, log_top, out=self.log_z)
        if wanted.top1:
            torch.ge(chosen, top, out=self.top1)
        if wanted.squares:
            torch.square(torch.linalg.vector_norm(out, dim=-1), out=self.squares)
        if wanted.mean_logp:
            torch.add(logits.mean(-1) - top, log_top, out=self.mean_logp)
        if wanted.entropy or wanted.entropy_gradient:
            mean = torch.linalg.vecdot(logits.clamp(min=LOWEST), out)
            torch.clamp(self.log_z - mean, min=0, out=self.entropy)


@dataclass(frozen=True)
class Pull:
    """Gradients of the loss with respect to the values of N tokens, shape [N] each; None where none flows."""

    logp: Tensor
    entropy: Tensor | None
    squares: Tensor | None
    mean_logp: Tensor | None

    @classmethod
    def of(cls, logp: Tensor | None, *others: Tensor | None) -> Pull | None:
        """Gather the gradients in the order of the fields, or None where there are none at all."""
        given = next((grad for grad in (logp, *others) if grad is not None), None)
        if given is None:
            return None
        return cls(torch.zeros_like(given) if logp is None else logp, *others)

    @property
    def linear(self) -> bool:
        """Whether a token's gradient is one number times a vector that the number does not enter."""
        return self.entropy is None and self.squares is None and self.mean_logp is None

    def rows(self, chosen: slice) -> Pull:
        """Return views of some tokens' gradients."""
        others = (self.entropy, self.squares, self.mean_logp)
        cut = [None if grad is None else grad[chosen] for grad in others]
        return Pull(self.logp[chosen], *cut)


def unit_gradient(
    logits: Tensor, probs: Tensor, stats: Statistics, targets: Tensor, cap: float | None
) -> None:
    """Turn probabilities into −∂ log p(y) / ∂z in place, back through the soft cap; `logits` are spent.

    Args:
        logits: Capped logits, shape [R, V]; only looked at where there is a cap.
        probs: Softmax of them, shape [R, V].
        stats: Of the same tokens.
        targets: Shape [R].
        cap: The soft cap, whose slope at cap·tanh(x) is 1 − tanh(x)².
    """
    # p − 1 without cancellation where p is nearly 1
    probs.scatter_(1, targets[:, None], torch.expm1(stats.logp)[:, None].to(probs.dtype))
    if cap is not None:
        probs.addcmul_(probs, logits.div_(cap).square_(), value=-1)


def gradient(
    logits: Tensor, probs: Tensor, stats: Statistics, targets: Tensor, pull: Pull, cap: float | None
) -> None:
    """Turn probabilities into the gradient of the loss with respect to the logits, in place; `logits` are spent.

    dz = p · (a p + b z + c) + g · onehot(y) + g_M / V with a = 2 g_S, b = −g_H and
    c = −g − 2 g_S S − g_H (H − log Σ exp z) − g_M.
    The arguments are those of `unit_gradient`.
    """
    slope = None if cap is None else 1 - (logits / cap).square_()
    constant = -pull.logp
    if pull.entropy is None:
        logits.zero_()
    else:
        logits.clamp_(min=LOWEST).mul_(-pull.entropy[:, None])
        constant = constant - pull.entropy * (stats.entropy - stats.log_z)
    if pull.squares is not None:
        logits.addcmul_(probs, 2 * pull.squares[:, None])
        constant = constant - 2 * pull.squares * stats.squares
    if pull.mean_logp is not None:
        constant = constant - pull.mean_logp
    probs.mul_(logits.add_(constant[:, None]))
    probs.scatter_add_(1, targets[:, None], pull.logp[:, None].to(probs.dtype))
    if pull.mean_logp is not None:
        probs.add_(pull.mean_logp[:, None] / probs.shape[-1])
    if slope is not None:
        probs.mul_(slope)


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a softmax is computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Cut a number of rows into slices of at most `size`."""
    for start in range(0, rows, max(1, size)):
        yield slice(start, min(rows, start + max(1, size)))


def block_rows(vocabulary: int, device: torch.device) -> int:
    """Return how many tokens' logits make up a block."""
    return max(1, SCRATCH["cpu" if device.type == "cpu" else "other"] // (4 * max(1, vocabulary)))
