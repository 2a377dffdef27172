"""From what a file holds to the rows of a dataset: recognising the format, judging and converting rows.

The file is read several times rather than held: once for its schema, once to judge every row, once to use them.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

from posttrain.contracts.format import Format
from posttrain.errors import DataError
from posttrain_plugins.data.formats import Schema, format_of, infer_format, type_name
from posttrain_plugins.data.formats.values import counted
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.parts import has_images, placed, taken
from posttrain_plugins.data.judging.flaws import unused_system
from posttrain_plugins.data.judging.meaning import as_meant
from posttrain_plugins.data.judging.preparing import Prepared
from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.reading.files import Entry, Readable, Row
from posttrain_plugins.data.rows import encode_row
from posttrain_plugins.data.splits import uniform


class ImagesLeft(DataError):
    """Rows have images, which are taken into files only where a gallery is given."""


@dataclass(frozen=True)
class Cleaned:
    """Rows that suit their format.

    Args:
        format: The canonical format of the rows.
        duplicates: How many rows equal an earlier one.
        notes: What was done to the rows on the way.
        entries: Begins to read the rows with their places.
        images: Whether rows name images of the gallery.
        counts: Rows of the source: all that were `read`, and of these the `unsuited` ones that were left out and the
            `silent` ones that gave no row.
    """

    format: str
    duplicates: int
    notes: tuple[str, ...]
    entries: Callable[[], Iterator[Entry]]
    images: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    def read(self) -> Iterator[Row]:
        """Begin to read the rows."""
        return (row for _, row in self.entries())

    @cached_property
    def rows(self) -> list[Row]:
        """All rows, in memory."""
        return list(self.read())


def clean(
    source: Readable,
    *,
    format: str | None,
    columns: Mapping[str, str],
    drop_duplicates: bool,
    limit: int | None,
    given: Format | None = None,
    json_columns: tuple[str, ...] = (),
    skip_invalid: bool = False,
    gallery: Gallery | None = None,
) -> Cleaned:
    """Rename columns, find the format, judge every row, make it canonical, and thin out.

    Args:
        source: What is read.
        format: The format's name; None recognises a built-in one from the columns of all rows.
        columns: New names of columns, by their old names.
        drop_duplicates: Keep the first of equal rows only.
        limit: Keep this many rows, chosen by their content.
        given: The format itself, where it is no built-in one.
        json_columns: Columns whose text is JSON to be parsed, by their new names.
        skip_invalid: Leave out rows that do not suit the format instead of refusing all.
        gallery: Takes the images of rows into files.

    Raises:
        ImagesLeft: Rows have images, and there is no gallery.
        DataError: The format cannot be told, or rows do not suit it; each with its place.
    """
    prepared = Prepared(source, columns, json_columns)
    name = format or _inferred(prepared)
    made = _Made(prepared, given or format_of(name), skip_invalid, gallery)
    kept = _Kept(limit, drop_duplicates)
    for place, row in made.judged():
        kept.add(row, place, made.refused)
    made.problems.check(fix="mend these rows, or leave such ones out with `skip_invalid: true`")
    if not kept.count:
        raise DataError(f"no row of `{name}` was left", where=source.source, found=made.told())
    chosen = kept.chosen()
    return Cleaned(
        made.format.becomes or name,
        kept.duplicates,
        made.notes(name, kept.count),
        lambda: compress(made.entries(), chosen),
        made.images,
        made.counts,
    )


@dataclass
class _Made:
    """Canonical rows of those that suit the format."""

    prepared: Prepared
    format: Format
    skip_invalid: bool
    gallery: Gallery | None
    images: bool = False
    problems: Problems = field(init=False)
    refused: Problems = field(init=False)
    _skipped: Problems = field(init=False)
    _suits: bytearray = field(default_factory=bytearray)
    _said_nothing: int = 0
    _systems: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.problems = Problems(self.prepared.source)
        self._skipped = Problems(self.prepared.source)
        self.refused = self._skipped if self.skip_invalid else self.problems

    def judged(self) -> Iterator[Entry]:
        """Yield canonical rows; note which of the rows they come from suit the format, and what is wrong with others.

        `problems.check` raises what is wrong.
        """
        types: dict[str, tuple[str, str]] = {}
        for place, row in as_meant(self.prepared, self.format):
            problem = self.format.problem(row) or conflict(row, place, types)
            made: list[Row] = []
            if problem is None:
                made, problem = self._converted(row, place)
            self._suits.append(problem is None)
            if problem:
                self.refused.add(place, problem)
                continue
            self._said_nothing += not made
            for each in made:
                if column := unused_system(each):
                    self._systems[column] += 1
                yield place, each

    def entries(self) -> Iterator[Entry]:
        """Yield canonical rows again, once all have been judged."""
        for place, row in compress(as_meant(self.prepared, self.format), self._suits):
            for each in self.format.rows(row):
                yield place, self._with_images(dict(each), place) if self.images else dict(each)

    @property
    def counts(self) -> dict[str, int]:
        """How many rows there were, and how many of them were left out or gave none."""
        return {"read": len(self._suits), "unsuited": self._skipped.count, "silent": self._said_nothing}

    def _converted(self, row: Row, place: str) -> tuple[list[Row], str | None]:
        """Return what a row becomes, or what is wrong with its images."""
        try:
            return [self._with_images(dict(each), place) for each in self.format.rows(row)], None
        except ImagesLeft:
            raise
        except DataError as error:
            return [], str(error).replace("\n  ", "; ")

    def _with_images(self, row: Row, place: str) -> Row:
        """Take the images of a row into files."""
        if not has_images(row):
            return row
        if self.gallery is None:
            raise ImagesLeft(
                "the row has images, which become files of a dataset",
                where=f"{self.prepared.source}, {place}",
                fix="load the rows with the stage `data.load`",
            )
        self.images = True
        return placed(taken(row, self.gallery))

    def notes(self, name: str, count: int) -> tuple[str, ...]:
        """Say what became of the rows."""
        notes = []
        if self._skipped.count:
            left = counted(self._skipped.count, "row")
            notes.append(f"{left} left out: {'; '.join(self._skipped.shown[:3])}")
        if self.format.becomes is not None:
            read, made = counted(self._suits.count(1), f"`{name}` row"), f"`{self.format.becomes}` row"
            none = f"; {self._said_nothing} gave none, such as equal ratings" if self._said_nothing else ""
            notes.append(f"{read} became {counted(count, made)}{none}")
        for column, rows in self._systems.items():
            notes.append(f"{rows} rows have a system prompt in `{column}`, of which no turn is made")
        return tuple(notes)

    def told(self) -> str:
        """Say what became of rows of which none is left."""
        if self._skipped.count:
            return f"{self._skipped.count} rows that cannot be used: {self._skipped.shown[0]}"
        return f"{self._said_nothing} rows that say nothing, such as equal ratings"


class _Kept:
    """Which rows stay, told by their content; holds a hash of each row."""

    def __init__(self, limit: int | None, drop_duplicates: bool) -> None:
        self.count = 0
        self.duplicates = 0
        self._limit = limit
        self._drop = drop_duplicates
        self._seen: set[bytes] = set()
        self._stays = bytearray()
        self._ranked: list[tuple[float, int]] = []

    def add(self, row: Row, place: str, refused: Problems) -> None:
        """Take the next row into account; one that cannot be written as JSON is refused."""
        try:
            digest = hashlib.blake2b(encode_row(row, place), digest_size=16).digest()
        except DataError as error:
            refused.add(place, error.message)
            self._stays.append(False)
            return
        repeated = digest in self._seen
        self._seen.add(digest)
        self.duplicates += repeated
        stays = not (repeated and self._drop)
        if stays and self._limit is not None:
            # Smallest first; a heap of the largest negative values drops the largest.
            entry = (-uniform(["limit", row]), -len(self._stays))
            if len(self._ranked) < self._limit:
                heapq.heappush(self._ranked, entry)
            else:
                heapq.heappushpop(self._ranked, entry)
        self._stays.append(stays)
        self.count += 1

    def chosen(self) -> bytes:
        """Return a byte for each row: whether it stays."""
        if self._limit is None or self._stays.count(1) <= self._limit:
            return bytes(self._stays)
        chosen = bytearray(len(self._stays))
        for _, index in self._ranked:
            chosen[-index] = 1
        return bytes(chosen)


def _inferred(prepared: Prepared) -> str:
    schema = Schema()
    for place, row in prepared.entries():
        schema.add(row, place)
    return infer_format(schema.columns, prepared.source, schema.told())


def conflict(row: Row, place: str, types: dict[str, tuple[str, str]]) -> str | None:
    """Compare a row's types with those of the first row that had each column; null fits any.

    Args:
        row: The row.
        place: Where it stands.
        types: The type of each column and where it was first seen; new ones are added.
    """
    for column, value in row.items():
        name = type_name(value)
        if name is None:
            continue
        expected, where = types.setdefault(column, (name, place))
        if name != expected:
            return f"`{column}` is a {name}, but a {expected} at {where}"
    return None
