"""Everything that is wrong or odd with the rows of a dataset, counted, with the first examples of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.contracts.format import Format, Row
from posttrain.contracts.stage import Level
from posttrain.errors import DataError
from posttrain_plugins.data.formats import Schema, format_of, infer_format
from posttrain_plugins.data.formats.inference import SeveralFormats
from posttrain_plugins.data.formats.values import ALL_OR_NONE, MARGIN, counted
from posttrain_plugins.data.judging.checks import Check
from posttrain_plugins.data.judging.cleaning import conflict
from posttrain_plugins.data.judging.labels import LABELLED, Labels, Sides
from posttrain_plugins.data.judging.meaning import as_meant
from posttrain_plugins.data.problems import RowsRefused
from posttrain_plugins.data.reading.files import DataFile, Entry, Readable, open_file
from posttrain_plugins.data.rows import encode_row
from posttrain_plugins.data.similarity.repeats import Repeats

Judge = Callable[[Row, str], str | None]
"""Says what is wrong with a row at a place, or returns None."""

EXAMPLES = 5
_RARE = 0.1
_FEW = 10
_REPEATS: Mapping[str, str] = {
    "repeated_rows": "rows that equal an earlier one",
    "contradicting_pairs": "pairs that stand in the other order elsewhere",
    "constant_sides": "pairs with the one text that nearly all have on that side",
}


@dataclass
class Problem:
    """One kind of problem.

    Args:
        code: Its name.
        title: What is wrong.
        level: How much that matters.
        fix: What to do about it.
        count: In how many rows.
        examples: The first of them, as (place, what is there).
    """

    code: str
    title: str
    level: Level
    fix: str | None = None
    count: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)

    def add(self, place: str, found: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((place, found))

    def as_dict(self) -> dict[str, Any]:
        """Return it for `report.json`."""
        examples = [{"place": place, "found": found} for place, found in self.examples]
        return {
            "code": self.code,
            "title": self.title,
            "level": self.level.value,
            "fix": self.fix,
            "count": self.count,
            "examples": examples,
        }


@dataclass(frozen=True)
class Report:
    """What was found.

    Args:
        format: The format of the rows.
        rows: How many were looked at.
        problems: The kinds of problems, errors first and the most frequent before others.
        source: The format that the file has, where it is another one.
        made: How many rows of `format` those of the file become.
    """

    format: str
    rows: int
    problems: tuple[Problem, ...]
    source: str | None = None
    made: int | None = None

    def count(self, level: Level) -> int:
        """Return how many kinds of problems have a level."""
        return sum(problem.level is level for problem in self.problems)

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""
        counts = {f"found.{problem.code}": float(problem.count) for problem in self.problems}
        return {"rows": float(self.rows), "errors": float(self.count(Level.ERROR)), **counts}

    def as_dict(self) -> dict[str, Any]:
        """Return it for `report.json`."""
        problems = [problem.as_dict() for problem in self.problems]
        of = {"source": self.source or self.format, "made": self.rows if self.made is None else self.made}
        return {"format": self.format, "rows": self.rows, **of, "problems": problems}

    def summary(self) -> str:
        """Return one line for people."""
        rows = counted(self.rows, f"`{self.source or self.format}` row")
        if self.made is not None:
            rows += f" that became {counted(self.made, f'`{self.format}` row')}"
        if not self.problems:
            return f"{rows}, nothing wrong"
        counts = [(self.count(level), level.value) for level in Level]
        told = ", ".join(f"{count} kind{'s' * (count > 1)} of {name}" for count, name in counts if count)
        return f"{rows}: {told}"


def inspect(
    entries: Iterable[tuple[str, Row]],
    format: Format,
    name: str,
    checks: Mapping[str, Check],
    judge: Judge | None = None,
    found: Sequence[Problem] = (),
) -> Report:
    """Look at every row.

    Args:
        entries: Rows with their places.
        format: Their format; those of a format that is not canonical are looked at as what they become.
        name: Its name.
        checks: What to look for in rows that suit it.
        judge: Says what is wrong with a row; the format does when left out.
        found: What is found while rows are read, such as lines that are none.
    """
    unsuited = Problem("unsuited", "rows that do not suit the format", Level.ERROR, "mend or drop them")
    silent = Problem("silent", "rows that say nothing and give none, such as equal ratings", Level.NOTE)
    odd = {code: Problem(code, check.title, check.level, check.fix) for code, check in checks.items()}
    canonical = format if format.becomes is None else format_of(format.becomes)
    whole = _Whole(format.becomes or name, canonical)
    rows = given = 0
    for rows, (place, row) in enumerate(entries, 1):  # noqa: B007 - the count is used
        problem = judge(row, place) if judge else format.problem(row)
        if problem:
            unsuited.add(place, problem)
            continue
        became = list(format.rows(row))
        given += len(became)
        if not became:
            silent.add(place, f"no `{format.becomes or name}` row comes of it")
        for made in became:
            whole.add(made)
            passages = canonical.passages(made)
            for code, check in checks.items():
                seen = check.find(made, passages)
                if seen:
                    if check.fix_for is not None and not odd[code].count:
                        odd[code].fix = check.fix_for(made)
                    odd[code].add(place, seen)
    kinds = [*found, unsuited, silent, *odd.values(), *whole.problems()]
    order = list(Level)
    kinds.sort(key=lambda each: (order.index(each.level), -each.count, each.code))
    problems = tuple(each for each in kinds if each.count)
    if format.becomes is None:
        return Report(name, rows, problems)
    return Report(format.becomes, rows, problems, name, given)


def inspect_file(
    path: Path,
    name: str | None,
    checks: Mapping[str, Check],
    given: Format | None = None,
    reading: Callable[[DataFile], Readable] = lambda file: file,
) -> Report:
    """Look at every row of a file, and at every line that is none.

    Args:
        path: The file.
        name: The format of its rows; None recognises it.
        checks: What to look for.
        given: The format itself, where it is no built-in one.
        reading: Returns what the rows are read from, such as the file with other names of columns.

    Raises:
        DataError: There is no such file, or its kind or the format is unknown.
    """
    file = reading(open_file(path))
    unread = Problem("unreadable", "rows that cannot be read", Level.ERROR, "mend the file")
    schema = Schema()
    for place, row in _readable(file.entries(), None):
        schema.add(row, place)
    try:
        format = given or format_of(name or infer_format(schema.columns, file.source, schema.told()))
    except DataError as error:
        list(_readable(file.entries(), unread))
        title = "several formats fit" if isinstance(error, SeveralFormats) else "no format fits"
        unknown = Problem("format", title, Level.ERROR, error.fix)
        unknown.add(file.source, error.message + (f" ({error.found})" if error.found else ""))
        unknown.count = max(schema.rows, 1)
        return Report("unknown", schema.rows, tuple(each for each in (unread, unknown) if each.count))
    found = name or infer_format(schema.columns, file.source)
    types: dict[str, tuple[str, str]] = {}

    def judge(row: Row, place: str) -> str | None:
        return format.problem(row) or conflict(dict(row), place, types) or _unwritable(row, place)

    rows = _readable(as_meant(file, format), unread)
    return inspect(rows, format, found, checks, judge, (unread,))


def _readable(entries: Iterator[Entry], unread: Problem | None) -> Iterator[Entry]:
    """Yield what can be read of a file, and note what cannot."""
    try:
        yield from entries
    except DataError as error:
        if unread is None:
            return
        shown = error.shown if isinstance(error, RowsRefused) else (str(error).replace("\n ", ";"),)
        unread.count += error.count if isinstance(error, RowsRefused) else 1
        unread.examples.extend(_divided(each) for each in shown)


def _divided(text: str) -> tuple[str, str]:
    place, _, found = text.partition(": ")
    return place, found


def _unwritable(row: Row, place: str) -> str | None:
    try:
        encode_row(row, place)
    except DataError as error:
        return error.message
    return None


class _Whole:
    """What only all rows together show."""

    def __init__(self, format: str, canonical: Format) -> None:
        self._repeats = Repeats(format, canonical.columns)
        self._with_margins = MARGIN in canonical.scalars
        self._rows = self._margins = 0
        self._sides = Sides()
        self._labelled = LABELLED.get(format)

    def add(self, row: Row) -> None:
        self._rows += 1
        self._margins += self._with_margins and MARGIN in row
        self._repeats.add(row)
        if self._labelled is not None:
            self._sides.add(self._labelled.of(row))

    def problems(self) -> Iterator[Problem]:
        for code, count in self._repeats.counts().items():
            fix = "`data.dedup` drops repeated rows" if code == "repeated_rows" else None
            yield Problem(code.replace("_", "-"), _REPEATS.get(code, code), Level.WARNING, fix, count)
        lacking = self._rows - self._margins
        if self._margins and lacking:
            title = f"no `{MARGIN}`, which {self._margins} of {self._rows} rows have"
            yield Problem("some-margins", title, Level.WARNING, ALL_OR_NONE, lacking)
        if self._labelled is not None:
            yield from self._one_sided(self._labelled, self._sides)

    def _one_sided(self, labelled: Labels, sides: Sides) -> Iterator[Problem]:
        title = labelled.one_class(sides)
        if title is not None:
            yield Problem("one-class", title, Level.WARNING, labelled.fix, self._rows)
        elif sides.total >= _FEW and min(sides.above, sides.below) < _RARE * sides.total:
            title = f"{labelled.yes} and {labelled.no} {labelled.what} are {sides.above} to {sides.below}"
            rare = min(sides.above, sides.below)
            yield Problem(
                "unbalanced-labels", title, Level.WARNING, "add more of the rarer ones, or weight them", rare
            )
