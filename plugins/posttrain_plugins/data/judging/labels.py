"""Labels of two classes: whether both are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from posttrain.contracts.format import Row

_EVEN = 0.5
"""The probability that is on neither side."""


@dataclass
class Sides:
    """How many labels there are, and on which side of one half."""

    total: int = 0
    above: int = 0
    below: int = 0

    def add(self, labels: Iterable[float]) -> Sides:
        """Count truth values or probabilities, and return the counts."""
        for label in labels:
            self.total += 1
            self.above += label > _EVEN
            self.below += label < _EVEN
        return self


@dataclass(frozen=True)
class Labels:
    """What a format labels.

    Args:
        what: What has a label each, such as `steps`.
        yes: What it is that has a label above one half.
        no: What it is that has one below.
        of: The labels of a row.
    """

    what: str
    yes: str
    no: str
    of: Callable[[Row], Iterable[float]]

    def one_class(self, sides: Sides) -> str | None:
        """Say so where all labels are on one side, which tells a model nothing but that."""
        if not sides.total or (sides.above and sides.below):
            return None
        count, side, other = sides.total, "undecided", f"{self.yes} or {self.no}"
        if sides.above or sides.below:
            ways = (sides.above, self.yes, self.no), (sides.below, self.no, self.yes)
            count, side, other = ways[not sides.above]
        return f"labels of one class only: {count} of {sides.total} {self.what} are {side}, none is {other}"

    @property
    def fix(self) -> str:
        """What to do about that."""
        return f"add {self.what} of the other class, or look at how the labels were made"

    def remarks(self, labels: Iterable[float]) -> list[str]:
        """Return what a trainer says of all labels that it trains on."""
        found = self.one_class(Sides().add(labels))
        return [] if found is None else [f"{found}, so nothing tells them apart; {self.fix}"]


LABELLED: Mapping[str, Labels] = {
    "unpaired_preference": Labels("completions", "good", "bad", lambda row: (row["label"],)),
    "stepwise": Labels("steps", "right", "wrong", lambda row: row["labels"]),
}
"""The formats with labels of two classes."""
