"""How numbers are spread: a few quantiles and a histogram with round edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BINS = 12
_ROUND = (1, 2, 5, 10)
_TAIL = 2.0
"""A greatest value beyond this many times the 99th percentile goes into a last, open bin."""


@dataclass(frozen=True)
class Bin:
    """Values from `low` up to but without `high`; None is no upper end."""

    low: float
    high: float | None
    count: int

    @property
    def label(self) -> str:
        """What people call it: `0–99`, `7`, or `400 or more`."""
        if self.high is None:
            return f"{self.low:g} or more"
        last = self.high - 1
        return f"{self.low:g}" if last <= self.low else f"{self.low:g}–{last:g}"


@dataclass(frozen=True)
class Spread:
    """Quantiles of whole numbers, and a histogram."""

    least: int
    median: int
    mean: float
    p95: int
    most: int
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread | None:
        """Describe whole numbers, none of them negative; None when there are none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            least=ordered[0],
            median=quantile(ordered, 0.5),
            mean=sum(ordered) / len(ordered),
            p95=quantile(ordered, 0.95),
            most=ordered[-1],
            bins=_bins(ordered),
        )


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the least value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _bins(ordered: Sequence[int]) -> tuple[Bin, ...]:
    least, most = ordered[0], ordered[-1]
    usual = quantile(ordered, 0.99)
    last = usual if most > _TAIL * usual else most
    width = _round_up(max(1.0, (last - least + 1) / _BINS))
    start = least // width * width
    counts = [0] * (int((last - start) // width) + 1)
    beyond = 0
    for value in ordered:
        position = int((value - start) // width)
        if position < len(counts):
            counts[position] += 1
        else:
            beyond += 1
    bins = [Bin(start + i * width, start + (i + 1) * width, count) for i, count in enumerate(counts)]
    if beyond:
        bins.append(Bin(start + len(counts) * width, None, beyond))
    return tuple(bins)


def _round_up(width: float) -> int:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(width))
    return int(power * next(step for step in _ROUND if step * power >= width))
