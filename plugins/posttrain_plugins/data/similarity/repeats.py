"""What is odd about rows beside each other, counted as they go by: facts that hand-off rules judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.artifacts.manifest import canonical
from posttrain_plugins.data.judging.flaws import PAIRED

_CONSTANT = 0.9
_FEW = 10
"""Among fewer pairs than this, a side that is always the same means nothing."""
_MANY = 1_000_000
"""Rows beyond this are not remembered, which bounds the memory."""


class Repeats:
    """Counts rows that repeat or contradict earlier ones.

    Args:
        format: The name of the rows' format.
        columns: Its own columns; two rows are the same when these and their images are.
    """

    def __init__(self, format: str, columns: Sequence[str]) -> None:
        self._columns = columns
        self._pairs = format in PAIRED
        self._rows = 0
        self._counts: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._orders: set[tuple[int, int, int]] = set()
        self._sides: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    def add(self, row: Mapping[str, Any]) -> None:
        """Look at one row, which suits the format."""
        self._rows += 1
        if self._rows > _MANY:
            return
        content = _hash([row.get(column) for column in (*self._columns, "images")])
        self._counts["repeated_rows"] += content in self._seen
        self._seen.add(content)
        if self._pairs:
            self._pair(row)

    def counts(self) -> dict[str, int]:
        """Return how many rows have each flaw; flaws that no row has are left out.

        `repeated_rows` equal an earlier one, `contradicting_pairs` are an earlier pair in the other order, and
        `constant_sides` have the one text on a side that nearly all pairs have there.
        """
        found = dict(self._counts)
        most = max((count for side in self._sides for count in side.values()), default=0)
        if self._rows >= _FEW and most >= _CONSTANT * min(self._rows, _MANY):
            found["constant_sides"] = most
        return {name: count for name, count in found.items() if count}

    def _pair(self, row: Mapping[str, Any]) -> None:
        prompt = _hash([row.get("prompt"), row.get("images")])
        chosen, rejected = (_hash(row.get(name)) for name in ("chosen", "rejected"))
        opposite = (prompt, rejected, chosen) in self._orders
        self._counts["contradicting_pairs"] += chosen != rejected and opposite
        self._orders.add((prompt, chosen, rejected))
        for side, value in zip(self._sides, (chosen, rejected), strict=True):
            side[value] += 1


def _hash(value: Any) -> int:
    """Hash for comparisons in this process."""
    return hash(value) if isinstance(value, str) else hash(canonical(value))
