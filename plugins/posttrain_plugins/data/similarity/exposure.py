"""Which rows of evaluation sets occur in which training sets, compared all with all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.similarity.overlap import Index, Measure, Overlap

Row = Mapping[str, Any]

_SHOWN = 40
"""Words of an overlap that are shown."""


@dataclass(frozen=True)
class RowSet:
    """A dataset to compare.

    Args:
        name: How people know it.
        format: Its format.
        read: Begins to read its rows.
        short: A short name for figures.
    """

    name: str
    format: str
    read: Callable[[], Iterable[Row]]
    short: str = ""


@dataclass(frozen=True)
class Hit:
    """What an evaluation row has in common with a training set.

    Args:
        row: Place of the training row with the longest overlap, the first of such.
        rows: How many training rows overlap it.
        longest: Most consecutive words in common.
        coverage: Share of the evaluation row's words in common with that training row.
        text: The beginning of the longest overlap, without case and punctuation.
    """

    row: int
    rows: int
    longest: int
    coverage: float
    text: str


@dataclass
class Evaluation:
    """What was found of one evaluation set.

    Args:
        name: How people know it.
        short: A short name for figures.
        rows: How many rows it has.
        unjudged: How many were compared as a whole alone.
        wordless: How many have no words, and were not compared.
        hits: By the places of the row and of the training set.
    """

    name: str
    short: str
    rows: int
    unjudged: int
    wordless: int
    hits: dict[tuple[int, int], Hit] = field(default_factory=dict)

    @property
    def contaminated(self) -> frozenset[int]:
        """The rows that some training set has."""
        return frozenset(row for row, _ in self.hits)

    @property
    def share(self) -> float:
        """The share of contaminated rows."""
        return len(self.contaminated) / self.rows

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the counts; `names` are those of the training sets."""
        by_set = {name: sum(place == index for _, place in self.hits) for index, name in enumerate(names)}
        return {
            "rows": self.rows,
            "contaminated": len(self.contaminated),
            "share": self.share,
            "longest": max((hit.longest for hit in self.hits.values()), default=0),
            "training": by_set,
            "compared_as_a_whole": self.unjudged,
            "without_words": self.wordless,
        }


@dataclass(frozen=True)
class Exposure:
    """What was found in all.

    Args:
        names: The training sets.
        trained: How many rows each has.
        overlapping: The places of those rows that overlap an evaluation row, for each.
        evaluations: The evaluation sets.
    """

    names: Sequence[str]
    trained: Sequence[int]
    overlapping: Sequence[frozenset[int]]
    evaluations: Sequence[Evaluation]

    @property
    def worst(self) -> float:
        """The largest share of contaminated rows of an evaluation set."""
        return max(each.share for each in self.evaluations)


def exposures(
    training: Sequence[RowSet],
    evaluation: Sequence[RowSet],
    measure: Measure,
    progress: Callable[[int], None] = lambda done: None,
) -> Exposure:
    """Compare every row of every training set with every row of every evaluation set.

    The words of the evaluation sets are kept in memory; training rows are read once.

    Raises:
        DataError: There is nothing to compare, or a row lacks the column that is compared.
    """
    if not training or not evaluation:
        missing = "training" if not training else "evaluation"
        raise DataError(f"there is no {missing} set to compare", expected="at least one of each")
    index = Index(measure)
    spans = [index.add(rows.read(), rows.format) for rows in evaluation]
    for rows, span in zip(evaluation, spans, strict=True):
        if not span:
            raise DataError("the evaluation set has no rows", where=rows.name)
    owner = [(place, span.start) for place, span in enumerate(spans) for _ in span]
    evaluations = [_opened(rows, span, index) for rows, span in zip(evaluation, spans, strict=True)]
    counts, overlapping, done = [], [], 0
    for place, source in enumerate(training):
        found: set[int] = set()
        count = 0
        for count, row in enumerate(source.read(), 1):
            overlaps = index.overlaps(row, source.format)
            for overlap in overlaps:
                which, first = owner[overlap.row]
                _note(evaluations[which].hits, (overlap.row - first, place), count - 1, overlap, index)
            if overlaps:
                found.add(count - 1)
            progress(done + count)
        done += count
        counts.append(count)
        overlapping.append(frozenset(found))
    return Exposure([rows.name for rows in training], counts, overlapping, evaluations)


def _opened(rows: RowSet, span: range, index: Index) -> Evaluation:
    wordless = sum(not index.texts[row] for row in span)
    unjudged = sum(row in index.by_whole for row in span) - wordless
    return Evaluation(rows.name, rows.short, len(span), unjudged, wordless)


def _note(
    hits: dict[tuple[int, int], Hit], key: tuple[int, int], row: int, overlap: Overlap, index: Index
) -> None:
    """Add a training row to what is known of an evaluation row; the longest overlap is kept."""
    before = hits.get(key)
    rows = 1 if before is None else before.rows + 1
    if before is not None and (before.longest, before.coverage) >= (overlap.longest, overlap.coverage):
        hits[key] = Hit(before.row, rows, before.longest, before.coverage, before.text)
        return
    text = index.texts[overlap.row][overlap.start : overlap.start + overlap.longest]
    shown = " ".join(text[:_SHOWN]) + (" …" if len(text) > _SHOWN else "")
    hits[key] = Hit(row, rows, overlap.longest, overlap.coverage, shown)
