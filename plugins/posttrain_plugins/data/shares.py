"""How many rows of each dataset a mixture takes: exact shares by largest remainder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from fractions import Fraction

from posttrain.errors import DataError


class Stop(StrEnum):
    """When a mixture is large enough."""

    EVERY_ROW = "every_row"
    FIRST_EXHAUSTED = "first_exhausted"
    ALL_EXHAUSTED = "all_exhausted"


def counts_of(
    sizes: Sequence[int], weights: Sequence[float], stop: Stop | int, repeat: bool = False
) -> list[int]:
    """Return how many rows each dataset gives.

    Args:
        sizes: The rows that each has.
        weights: Their shares; none means in proportion to the sizes.
        stop: When to stop, or how many rows there are to be.
        repeat: Whether a dataset may give more rows than it has.

    Raises:
        DataError: A dataset would have to give more rows than it has.
    """
    if stop is Stop.EVERY_ROW:
        return list(sizes)
    shares = _shares(weights or sizes)
    total = stop if isinstance(stop, int) else _total(sizes, shares, stop)
    counts = apportioned(total, shares)
    if stop is Stop.ALL_EXHAUSTED:
        # Rounding down must not leave out the last row of a dataset that was to be used up.
        counts = [
            max(count, size) if share else 0 for count, size, share in zip(counts, sizes, shares, strict=True)
        ]
    short = [place for place, (count, size) in enumerate(zip(counts, sizes, strict=True)) if count > size]
    if short and not repeat:
        place = short[0]
        raise DataError(
            f"dataset {place + 1} has too few rows",
            found=f"{sizes[place]} rows of {counts[place]} that are wanted",
            fix="ask for fewer rows, lower its weight, or set `repeat: true`",
        )
    return counts


def apportioned(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide a number into whole parts that add up to it: rounded down, the largest remainders get one more.

    Args:
        total: The number.
        shares: The parts' shares, which add up to 1. A share of 0 gets nothing.
    """
    exact = [total * share for share in shares]
    counts = [math.floor(each) for each in exact]
    order = sorted(range(len(shares)), key=lambda place: (counts[place] - exact[place], place))
    for place in order[: total - sum(counts)]:
        counts[place] += 1
    return counts


def _shares(weights: Sequence[float]) -> list[Fraction]:
    # By way of their decimal spelling: 0.1 is meant as a tenth, which no binary fraction is.
    exact = [Fraction(str(weight)) for weight in weights]
    whole = sum(exact)
    return [each / whole for each in exact]


def _total(sizes: Sequence[int], shares: Sequence[Fraction], stop: Stop) -> int:
    """Return how many rows there are when the first dataset, or the last, is used up."""
    reach = [size / share for size, share in zip(sizes, shares, strict=True) if share]
    return math.floor(min(reach)) if stop is Stop.FIRST_EXHAUSTED else math.ceil(max(reach))
