"""Collecting what is wrong with the rows of a file, so that one look at the message shows the extent."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.errors import DataError

_SHOWN = 5
_FOUND = "the row has "
"""How what stands behind a semicolon begins where it is no hint but what was found."""


class RowsRefused(DataError):
    """Rows of a file cannot be used.

    Attributes:
        count: How many.
        shown: The first of them, as `place: what is wrong`.
    """

    count: int = 1
    shown: tuple[str, ...] = ()

    def of(self, problems: Problems) -> RowsRefused:
        """Return the error with its numbers."""
        self.count, self.shown = problems.count, tuple(problems.shown)
        return self


@dataclass
class Problems:
    """What is wrong with the rows of one source; the first few are kept, all are counted.

    Args:
        source: The file or dataset, for the message.
    """

    source: str
    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, place: str, message: str) -> None:
        """Note one problem at `place`, such as `line 7`."""
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{place}: {message}")

    def check(self, fix: str | None = None) -> None:
        """Raise what was collected.

        Raises:
            RowsRefused: There was at least one problem.
        """
        if not self.count:
            return
        shown, hint = _hint_apart(self.shown)
        fix = "; ".join(filter(None, (hint, fix))) or None
        if self.count == 1:
            raise RowsRefused(shown[0], where=self.source, fix=fix).of(self)
        rest = self.count - len(shown)
        lines = [*shown, f"and {rest} more"] if rest else shown
        raise RowsRefused(
            f"{self.count} rows cannot be used", where=self.source, found="\n    ".join(["", *lines]), fix=fix
        ).of(self)


def _hint_apart(lines: list[str]) -> tuple[list[str], str | None]:
    """Return lines without the hint that all of them end with after a semicolon, and that hint."""
    parts = [line.partition("; ") for line in lines]
    hints = {hint for _, _, hint in parts}
    hint = hints.pop() if len(hints) == 1 else ""
    tells = bool(hint) and len(lines) > 1 and not hint.startswith(_FOUND)
    return ([line for line, _, _ in parts], hint) if tells else (lines, None)


def at_row(error: DataError, place: int) -> DataError:
    """Return an error about a row with the row's number; `place` counts from 0."""
    return DataError(
        error.message, where=f"row {place + 1}", found=error.found, expected=error.expected, fix=error.fix
    )
