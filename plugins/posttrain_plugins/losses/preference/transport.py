"""Optimal transport between two samples of numbers: the smallest to the smallest, the largest to the largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Coupling:
    """Which places of two samples are matched, and how much of each; C matches.

    Args:
        left: Places in the first sample, shape [C].
        right: Places in the second sample, shape [C].
        mass: How much is matched, shape [C]; it sums to the weights, and is 0 for some.
    """

    left: Tensor
    right: Tensor
    mass: Tensor

    def to_left(self, values: Tensor) -> Tensor:
        """Sum the values of matches, times their mass, over each place of the first sample."""
        return values.new_zeros(len(self.left) // 2).index_add(0, self.left, values * self.mass)


def coupling(left: Tensor, right: Tensor, weight: Tensor) -> Coupling:
    """Match two samples of n weighted numbers by their quantiles, which costs least for any convex cost.

    With equal weights the i-th smallest of one is matched with the i-th smallest of the other. A number of weight 2
    counts as two numbers, and one of weight 0 as none.

    Args:
        left: Numbers, shape [n].
        right: Numbers, shape [n].
        weight: The weight of the i-th number of each, shape [n].
    """
    from torch import cat, searchsorted

    sides = [side.detach().argsort() for side in (left, right)]
    ends = [weight.detach().double()[order].cumsum(0) for order in sides]
    edges = cat(ends).sort().values
    starts = cat([edges.new_zeros(1), edges[:-1]])
    middle = (starts + edges) / 2
    last = len(left) - 1
    found = [order[searchsorted(end, middle).clamp(max=last)] for order, end in zip(sides, ends, strict=True)]
    return Coupling(found[0], found[1], (edges - starts).to(left))
