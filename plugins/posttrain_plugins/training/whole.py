"""Losses that see the whole step: the scores of all ranks in one place, and the slopes back to each part.

L depends on the scores s of all examples. They are computed once without gradient, joined, and dL/ds is taken;
each part is then scored again with gradient and back-propagates Σ (dL/ds)·s, whose gradient is that of L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.trainer import Example, Scores
from posttrain_plugins.training.batches import Deal
from posttrain_plugins.training.head import Wanted


def joined(
    dealt: Deal, parts: Sequence[Scores], parallel: Parallel, wanted: Wanted, reference: Tensor | None
) -> Scores:
    """Return the scores of the whole step, the same on every rank; log-probs are leaves that take a gradient.

    Args:
        dealt: The step.
        parts: The scores of this rank's micro-batches, without gradient.
        parallel: The ranks.
        wanted: What the scores hold.
        reference: Reference log-probs of all sequences of the step.
    """
    examples, device = dealt.examples, parallel.device
    own = _places(dealt, parallel.rank)

    def whole(name: str, leaf: bool) -> Tensor:
        values = torch.zeros(dealt.counts.tokens, device=device)
        for place, scores in zip(own, parts, strict=True):
            values[place] = getattr(scores, name).float()
        return parallel.sum(values).requires_grad_(leaf)

    lengths = torch.tensor([each.predicted for example in examples for each in example.sequences])
    return Scores(
        examples=examples,
        logp=whole("logp", True),
        entropy=whole("entropy", wanted.entropy_gradient),
        top1=whole("top1", False).bool(),
        sequence=torch.repeat_interleave(lengths).to(device),
        lengths=lengths.to(device),
        weight=torch.tensor([example.weight for example in examples], device=device),
        reference=reference,
        squares=whole("squares", True) if wanted.squares else None,
    )


@dataclass(frozen=True)
class Slopes:
    """dL/d(log-prob), and dL/d(entropy) and dL/d(Σp²) where those matter, for the tokens of one part."""

    logp: Tensor
    entropy: Tensor | None
    squares: Tensor | None

    def times(self, scores: Scores) -> Tensor:
        """Return Σ slope · score, whose gradient is this part's share of that of the loss."""
        total = (self.logp * scores.logp).sum()
        if self.entropy is not None:
            total = total + (self.entropy * scores.entropy).sum()
        if self.squares is not None and scores.squares is not None:
            total = total + (self.squares * scores.squares).sum()
        return total


def slopes(total: Tensor, whole: Scores, dealt: Deal, rank: int) -> list[Slopes]:
    """Differentiate the loss and return the slopes of each of a rank's micro-batches."""
    leaves = [whole.logp, whole.entropy, whole.squares]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    by_leaf = {id(leaf): slope for leaf, slope in zip(wanted, found, strict=True)}
    logp, entropy, squares = (by_leaf.get(id(leaf)) for leaf in leaves)
    assert logp is not None, "log-probs always take a gradient"
    return [
        Slopes(
            logp[place],
            None if entropy is None else entropy[place],
            None if squares is None else squares[place],
        )
        for place in _places(dealt, rank)
    ]


def _places(dealt: Deal, rank: int) -> list[slice]:
    """Return where the tokens of a rank's micro-batches stand among those of the step."""
    every: list[Sequence[Example]] = [part for parts in dealt.rounds for part in parts]
    sizes = [sum(example.predicted for example in part) for part in every]
    ends = list(accumulate(sizes))
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    ranks = len(dealt.rounds[0])
    return places[rank::ranks]
