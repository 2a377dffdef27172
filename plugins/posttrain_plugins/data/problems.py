"""Collecting what is wrong with the rows of a file, so that one look at the message shows the extent."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.errors import DataError

_SHOWN = 5


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
            DataError: There was at least one problem.
        """
        if not self.count:
            return
        if self.count == 1:
            raise DataError(self.shown[0], where=self.source, fix=fix)
        rest = self.count - len(self.shown)
        lines = [*self.shown, f"and {rest} more"] if rest else self.shown
        raise DataError(
            f"{self.count} rows cannot be used", where=self.source, found="\n    ".join(["", *lines]), fix=fix
        )
