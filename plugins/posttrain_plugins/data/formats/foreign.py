"""What formats of other tools have in common: their rows become canonical ones, and are judged as those."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from posttrain.contracts.format import Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats.values import listed


class Misshapen(ValueError):
    """A row cannot become canonical; the message begins with its column."""


class Foreign(Format):
    """A format whose rows become those of `canonical`.

    `converted` raises `Misshapen` where it cannot make anything of a row.
    """

    canonical: ClassVar[type[Format]]

    @abstractmethod
    def converted(self, row: Row) -> Iterable[Row]:
        """Return the canonical rows of a row."""

    def problem(self, row: Row) -> str | None:
        """Say what is wrong with a row or with what it becomes."""
        missing = [column for column in self.columns if column not in row]
        if missing:
            return f"no column `{missing[0]}`; the row has {listed(row)}"
        try:
            made = list(self.converted(row))
        except Misshapen as error:
            return str(error)
        judge = self.canonical()
        return next(filter(None, map(judge.problem, made)), None)

    def rows(self, row: Row) -> Iterable[Row]:
        """Return the canonical rows of a row that has no problem."""
        return self.converted(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """Return the passages of what a row becomes."""
        judge = self.canonical()
        return tuple(passage for made in self.converted(row) for passage in judge.passages(made))


def demand(good: bool, problem: str) -> None:
    """Refuse a row.

    Raises:
        Misshapen: It is not good.
    """
    if not good:
        raise Misshapen(problem)


def string(row: Mapping[str, Any], column: str, *, optional: bool = False) -> str:
    """Return a column's text; an optional one may be absent or null, which is no text.

    Raises:
        Misshapen: It is no string.
    """
    value = row.get(column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise Misshapen(f"`{column}` is {type(value).__name__}, not a string")
    return value
