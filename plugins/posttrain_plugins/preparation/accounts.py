"""What became of the rows of a dataset: which were left out, shortened or changed, and which these were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.contracts.stage import Level
from posttrain.contracts.trainer import Example
from posttrain.errors import DataError

NAMED = 5
"""How many of the rows with something in common are named."""
TOLD = 10
"""Of how many sorts of remarks the rows are told."""
MINOR = frozenset({"trimmed", "markers-differ"})
"""Notes of a reading that take nothing away from what is learned."""
KINDS, OTHERS = 50, "other reasons"
"""So many kinds of what is wrong with rows are kept apart."""
MUCH = 0.01
"""Truncation of more than this share of all rows is a warning."""


@dataclass
class Groups:
    """Rows by what is said of them; the first of each are named."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[int]] = field(default_factory=dict)

    def add(self, index: int, text: str) -> None:
        """Count a row, given by its index."""
        self.counts[text] += 1
        named = self.first.setdefault(text, [])
        if len(named) < NAMED:
            named.append(index + 1)

    def take(self, other: Groups, called: Callable[[str], str] = str) -> None:
        """Count what another part of the dataset counted; its rows come later.

        Args:
            other: What it counted.
            called: What each of its texts is called here.
        """
        for text, count in other.counts.items():
            said = called(text)
            self.counts[said] += count
            self.first[said] = [*self.first.get(said, []), *other.first[text]][:NAMED]

    def rows(self, text: str) -> str:
        """Name the first rows of a group, from 1."""
        more = ", …" if self.counts[text] > len(self.first[text]) else ""
        return f"row{'s' if self.counts[text] > 1 else ''} {', '.join(map(str, self.first[text]))}{more}"


@dataclass
class Refusals:
    """Rows that must not be left out in silence: what prepares them ends once all were looked at.

    Attributes:
        groups: The rows, by what is wrong; of very many kinds of it the rest are one.
        errors: The first error of each kind.
    """

    groups: Groups = field(default_factory=Groups)
    errors: dict[str, DataError] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many rows."""
        return self.groups.counts.total()

    def add(self, index: int, error: DataError) -> None:
        """Note a row, given by its index."""
        text = f"{error.where}: {error.message}" if error.where else error.message
        kind = self._kind(text)
        self.groups.add(index, kind)
        self.errors.setdefault(kind, _at(index, error))

    def take(self, other: Refusals) -> None:
        """Note those of another part of the dataset; its rows come later."""
        for text, error in other.errors.items():
            self.errors.setdefault(self._kind(text), error)
        self.groups.take(other.groups, self._kind)

    def _kind(self, text: str) -> str:
        return text if text in self.errors or len(self.errors) < KINDS else OTHERS

    def check(self, rows: int) -> None:
        """Raise one error for all.

        Args:
            rows: How many rows were looked at.

        Raises:
            DataError: There is a refused row; the commonest kinds are told, and the first rows of each are named.
        """
        if self.count <= 1:
            for error in self.errors.values():
                raise error
            return
        kinds = self.groups.counts.most_common(NAMED)
        lines = [f"{count} row(s): {self._told(text)} ({self.groups.rows(text)})" for text, count in kinds]
        if rest := self.count - sum(count for _, count in kinds):
            lines.append(f"and {rest} more")
        first = self.errors[kinds[0][0]]
        raise DataError(
            f"{self.count} of {rows} rows cannot be used",
            found="\n    ".join(["", *lines]),
            expected=first.expected,
            fix=first.fix or "mend these rows, or take them out of the dataset",
        )

    def _told(self, text: str) -> str:
        found = self.errors[text].found
        return text if found is None else f"{text}, such as {found}"


def _at(index: int, error: DataError) -> DataError:
    """Return an error that names its row."""
    place = f"row {index + 1}" if error.where is None else f"row {index + 1}, {error.where}"
    return DataError(error.message, where=place, found=error.found, expected=error.expected, fix=error.fix)


@dataclass
class Account:
    """What became of rows.

    Args:
        rows: How many there were.
        kept: How many of them can be trained on.
        left_out: Those that cannot, by reason.
        refused: Those that must not be left out unasked, by what is wrong with them.
        remarks: Those of which the chat template does not show everything as it is, by what happens.
        truncated: Rows that were shortened.
        lost: Tokens that truncation took from the rows that stayed.
        minor: The remarks that need no action.
        straddling: Rows that stayed in which a token reaches from the prompt into the answer.
        tokens: Tokens of the rows that stayed.
        supervised: Of these, those that are learned.
    """

    rows: int = 0
    kept: int = 0
    left_out: Groups = field(default_factory=Groups)
    refused: Refusals = field(default_factory=Refusals)
    remarks: Groups = field(default_factory=Groups)
    minor: set[str] = field(default_factory=set)
    truncated: int = 0
    lost: int = 0
    straddling: int = 0
    tokens: int = 0
    supervised: int = 0

    @property
    def dropped(self) -> Counter[str]:
        """Rows left out, by reason."""
        return self.left_out.counts

    def keep(self, example: Example, whole: Example) -> None:
        """Count a row that stays, `whole` before it was shortened."""
        self.kept += 1
        learned, lost = example.learned, whole.learned.size - example.learned.size
        self.truncated += lost > 0
        self.lost += lost
        self.straddling += any(sequence.straddling for sequence in learned.sequences)
        self.tokens += example.size
        self.supervised += learned.predicted

    def remark(self, index: int, notes: Sequence[Any]) -> None:
        """Count what a reading says about a row, each thing once however many messages it is said of."""
        for message in dict.fromkeys(note.message for note in notes):
            self.remarks.add(index, message)
        self.minor.update(note.message for note in notes if note.code in MINOR)

    def take(self, other: Account) -> None:
        """Count what another part of the dataset came to."""
        self.left_out.take(other.left_out)
        self.refused.take(other.refused)
        self.remarks.take(other.remarks)
        self.minor |= other.minor
        for name in ("rows", "kept", "truncated", "lost", "straddling", "tokens", "supervised"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def reasons(self) -> list[str]:
        """How many rows were left out, for which reason and which came first, by frequency."""
        return [
            f"{count} row(s) dropped: {reason} ({self.left_out.rows(reason)})"
            for reason, count in self.dropped.most_common()
        ]

    @property
    def notes(self) -> list[tuple[Level, str]]:
        """What there is to tell about the rows, and how much it matters."""
        notes = [(Level.WARNING, reason) for reason in self.reasons]
        if self.truncated:
            share = self.truncated / self.rows
            text = f"{self.truncated} row(s) ({share:.2%}) shortened to the longest length, {self.lost} tokens lost"
            notes.append((Level.WARNING if share > MUCH else Level.NOTE, text))
        if self.straddling:
            text = (
                f"{self.straddling} row(s) have a token that begins in the prompt and ends in the answer; "
                "such tokens are not learned"
            )
            notes.append((Level.WARNING, text))
        remarks = self.remarks.counts.most_common()
        for text, count in remarks[:TOLD]:
            level = Level.NOTE if text in self.minor else Level.WARNING
            notes.append((level, f"{count} row(s): {text} ({self.remarks.rows(text)})"))
        if len(remarks) > TOLD:
            notes.append((Level.WARNING, f"{len(remarks) - TOLD} more remarks; see `posttrain data inspect`"))
        return notes

    @property
    def figures(self) -> dict[str, float]:
        """The counts as key figures."""
        return {
            "rows": float(self.kept),
            "rows_dropped": float(self.dropped.total()),
            "rows_truncated": float(self.truncated),
        }
