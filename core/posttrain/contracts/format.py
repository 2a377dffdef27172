"""The data-format contract: what the rows of a dataset look like and what they say.

Formats that trainers take are *canonical*. Others, such as the formats of other tools, say which canonical one their
rows become; `data.load` turns them into it, so that everything behind it sees canonical rows alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.passage import Passage

Row = Mapping[str, Any]
Conversion = Callable[[Row], Iterable[Row]]
"""Turns one row into the rows of another format: none, one or several."""


@dataclass(frozen=True)
class Column:
    """What one column holds over all rows.

    Args:
        types: JSON types by how often they occur: `string`, `number`, `boolean`, `list`, `object`, `null`.
        keys: Of lists of objects and of objects, the keys that occur.
        present: In how many rows the column occurs.
        rows: How many rows there are.
        starts: Of lists of messages, the roles that their first messages have.
        truths: In how many rows it is a text that spells a truth value, such as `true` or `0`.
    """

    types: Mapping[str, int]
    keys: frozenset[str]
    present: int
    rows: int
    starts: frozenset[str] = frozenset()
    truths: int = 0


class Format(ABC):
    """One format of rows. Registered under `Group.FORMAT` as a class; light.

    Class attributes:
        columns: The columns that every row has.
        optional: Columns that mean something where they are there; all others travel along.
        scalars: Columns that hold one number (`float`) or truth value (`bool`) each. Of files that hold text alone,
            such as CSV, these are read as what they are; a text that spells none stays one, for `problem` to refuse.
        becomes: The canonical format that `rows` makes; None for a canonical format.
        conversions: How rows become those of other canonical formats, by name.
    """

    config: ClassVar[type[Config]] = NoOptions
    columns: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[Mapping[str, type[bool] | type[float]]] = {}
    becomes: ClassVar[str | None] = None
    conversions: ClassVar[Mapping[str, Conversion]] = {}

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Whether the columns of all rows together look like this format."""
        return all(name in schema for name in self.columns)

    @abstractmethod
    def problem(self, row: Row) -> str | None:
        """Say what makes a row unusable, beginning with the column as `` `column` … ``, or return None."""

    def rows(self, row: Row) -> Iterable[Row]:
        """Return the canonical rows that a row stands for: itself where the format is canonical."""
        return (row,)

    @abstractmethod
    def passages(self, row: Row) -> Sequence[Passage]:
        """Return what a canonical row holds, in the order of its roles; one passage without a completion is a prompt.

        Raises:
            DataError: Something beside the texts, such as `tools`, is malformed.
        """
