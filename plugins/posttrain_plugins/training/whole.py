"""Losses that see the whole step: the scores of all ranks in one place, and the slopes back to each part.

L depends on the scores s of all examples. They are computed once without gradient, joined, and dL/ds is taken;
each part is then scored again with gradient and back-propagates Σ (dL/ds)·s, whose gradient is that of L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.loss import Need
from posttrain.contracts.trainer import Example, Scores
from posttrain_plugins.training.batches import Deal
from posttrain_plugins.training.head import Wanted


def joined(
    dealt: Deal, parts: Sequence[Scores], parallel: Parallel, wanted: Wanted, needs: frozenset[Need]
) -> Scores:
    """Return the scores of the whole step, the same on every rank; log-probs are leaves that take a gradient.

    Args:
        dealt: The step.
        parts: The scores of this rank's micro-batches, without gradient.
        parallel: The ranks.
        wanted: What the scores hold.
        needs: What the batch has to hold.
    """
    examples, device = dealt.examples, parallel.device
    own = _places(dealt, parallel.rank)

    def whole(name: str, leaf: bool) -> Tensor:
        values = torch.zeros(dealt.counts.tokens, device=device)
        for place, scores in zip(own, parts, strict=True):
            values[place] = getattr(scores, name).float()
        return parallel.sum(values).requires_grad_(leaf)

    valued = any(scores.value is not None for scores in parts)
    lengths = torch.tensor([each.predicted for example in examples for each in example.sequences])
    return Scores(
        examples=examples,
        logp=whole("logp", True),
        entropy=whole("entropy", wanted.entropy_gradient),
        top1=whole("top1", False).bool(),
        sequence=torch.repeat_interleave(lengths).to(device),
        lengths=lengths.to(device),
        weight=torch.tensor([example.weight for example in examples], device=device),
        squares=whole("squares", True) if wanted.squares else None,
        mean_logp=whole("mean_logp", True) if wanted.mean_logp else None,
        value=whole("value", True) if valued else None,
        needs=needs,
    )


LEAVES = ("logp", "entropy", "squares", "mean_logp", "value")
"""The scores that a loss may depend on."""


@dataclass(frozen=True)
class Slopes:
    """dL/ds of the scores s that matter, by name, for the tokens of one part."""

    of: Mapping[str, Tensor]

    def times(self, scores: Scores) -> Tensor:
        """Return Σ slope · score, whose gradient is this part's share of that of the loss."""
        parts = [(slope * getattr(scores, name)).sum() for name, slope in self.of.items()]
        return torch.stack(parts).sum()


def slopes(total: Tensor, whole: Scores, dealt: Deal, rank: int) -> list[Slopes]:
    """Differentiate the loss and return the slopes of each of a rank's micro-batches."""
    leaves = {
        name: leaf for name in LEAVES if (leaf := getattr(whole, name)) is not None and leaf.requires_grad
    }
    if whole.value is not None:
        leaves = {"value": whole.value}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    named = dict(zip(leaves, found, strict=True))
    return [Slopes({name: slope[place] for name, slope in named.items()}) for place in _places(dealt, rank)]


def _places(dealt: Deal, rank: int) -> list[slice]:
    """Return where the tokens of a rank's micro-batches stand among those of the step."""
    every: list[Sequence[Example]] = [part for parts in dealt.rounds for part in parts]
    sizes = [sum(example.predicted for example in part) for part in every]
    ends = list(accumulate(sizes))
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    ranks = len(dealt.rounds[0])
    return places[rank::ranks]
