"""Runs of words that evaluation rows have in common with training rows.

The evaluation sets are small and make the index; training rows are read once, one by one. A row is compared by its
n-grams (Brown et al., https://arxiv.org/abs/2005.14165, appendix C, uses 13 words and any common one; Lambert et
al., https://arxiv.org/abs/2411.15124, 8 words that cover half of the row). One that is shorter has to occur as a
whole, and one of very few words has to be all that is asked, in one turn or in a whole prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.formats import required
from posttrain_plugins.data.problems import at_row
from posttrain_plugins.data.similarity.shingles import PROMPT, ROW, chosen, prompt_turns, turns_of, words

Row = Mapping[str, Any]
Words = tuple[int, ...]
"""Words by number; 0 is one that no evaluation row has."""

_INSTRUCTIONS = frozenset({"system", "developer"})
"""Roles whose turns are the same for many rows, and are no part of what one asks."""


@dataclass(frozen=True)
class Measure:
    """What counts as an overlap.

    Args:
        ngram: Words in a row that make one.
        coverage: Least share of an evaluation row's words that lie in such runs, all from one training row.
        shortest: A row of fewer words has to be all of a training row's prompt or of one of its questions.
        common: A run that more rows than this of an evaluation set have is a template, and counts for nothing.
        on: What is compared of evaluation rows: `prompt`, without instructions; `row`; or a column.
    """

    ngram: int = 13
    coverage: float = 0.0
    shortest: int = 5
    common: int | None = 10
    on: str = PROMPT


@dataclass(frozen=True)
class Overlap:
    """What one evaluation row has in common with one training row.

    Args:
        row: Index of the evaluation row in the whole index.
        longest: Most consecutive words that both have.
        start: Where these begin in the evaluation row.
        coverage: Share of the evaluation row's words that lie in common runs.
    """

    row: int
    longest: int
    start: int
    coverage: float


@dataclass
class Index:
    """The words of evaluation rows, to be looked up.

    Args:
        measure: What counts.
    """

    measure: Measure
    texts: list[list[str]] = field(default_factory=list)
    by_whole: set[int] = field(default_factory=set)
    """Rows that have no run of their own that could be found, and are only compared as a whole."""
    _numbers: dict[str, int] = field(default_factory=dict)
    _rows: list[Words] = field(default_factory=list)
    _runs: dict[Words, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    _starts: dict[Words, list[int]] = field(default_factory=lambda: defaultdict(list))
    _wholes: dict[Words, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rows: Iterable[Row], format: str) -> range:
        """Add an evaluation set and return the indices of its rows.

        Raises:
            DataError: A row lacks the column that is compared.
        """
        first = len(self._rows)
        for place, row in enumerate(rows):
            try:
                spelled = asked_words(row, format, self.measure.on)
            except DataError as error:
                raise at_row(error, place) from error
            self.texts.append(spelled)
            self._rows.append(
                tuple(self._numbers.setdefault(word, len(self._numbers) + 1) for word in spelled)
            )
        added = range(first, len(self._rows))
        runs: dict[Words, list[tuple[int, int]]] = defaultdict(list)
        for index in added:
            self._enter(index, runs)
        self._admit(runs, added)
        return added

    def _enter(self, index: int, runs: dict[Words, list[tuple[int, int]]]) -> None:
        own, measure = self._rows[index], self.measure
        if own:
            self._wholes[own].append(index)
        if len(own) >= measure.ngram:
            for start in range(len(own) - measure.ngram + 1):
                runs[own[start : start + measure.ngram]].append((index, start))
        elif len(own) >= measure.shortest:
            self._starts[own[: measure.shortest]].append(index)

    def _admit(self, runs: Mapping[Words, list[tuple[int, int]]], added: range) -> None:
        """Take the runs that are no template into the index."""
        findable = set()
        for run, places in runs.items():
            rows = {row for row, _ in places}
            if self.measure.common is None or len(rows) <= self.measure.common:
                self._runs[run].extend(places)
                findable |= rows
        self.by_whole.update(
            index
            for index in added
            if index not in findable
            and not self.measure.shortest <= len(self._rows[index]) < self.measure.ngram
        )

    def overlaps(self, row: Row, format: str) -> list[Overlap]:
        """Return the evaluation rows that a training row overlaps, each once."""
        turns = [self._known(text) for text in trained_texts(row, format)]
        sequence = tuple(number for turn in turns for number in turn)
        wholes = {*turns, sequence} if self.measure.on != PROMPT else self._questions(row, format)
        found = {row: self._all_of(row) for whole in wholes for row in self._wholes.get(whole, ())}
        found |= {row: self._all_of(row) for row in self._contained(sequence)}
        for each in self._covered(sequence):
            found.setdefault(each.row, each)
        return [found[row] for row in sorted(found)]

    def _questions(self, row: Row, format: str) -> set[Words]:
        """Return what a training row asks, as a whole and turn by turn."""
        turns = [(role, self._known(text)) for role, text in turns_of(prompt_turns(row, format))]
        whole = tuple(n for role, turn in turns if role not in _INSTRUCTIONS for n in turn)
        return {whole, *(turn for role, turn in turns if role == "user")}

    def _known(self, text: str) -> Words:
        return tuple(self._numbers.get(word, 0) for word in words(text))

    def _all_of(self, row: int) -> Overlap:
        return Overlap(row, len(self._rows[row]), 0, 1.0)

    def _contained(self, sequence: Words) -> Iterator[int]:
        """Return the shorter rows that occur as a whole."""
        size = self.measure.shortest
        for start in _windows(sequence, size) if self._starts else ():
            for row in self._starts.get(sequence[start : start + size], ()):
                own = self._rows[row]
                if sequence[start : start + len(own)] == own:
                    yield row

    def _covered(self, sequence: Words) -> Iterator[Overlap]:
        """Return the rows that enough common runs cover."""
        size = self.measure.ngram
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start in _windows(sequence, size) if self._runs else ():
            for row, place in self._runs.get(sequence[start : start + size], ()):
                places[row].append((start - place, place))
        for row, found in places.items():
            covered = len({word for _, place in found for word in range(place, place + size)})
            coverage = covered / len(self._rows[row])
            if coverage >= self.measure.coverage:
                yield Overlap(row, *_longest(sorted(found), size), coverage)


def asked_words(row: Row, format: str, on: str) -> list[str]:
    """Return the words that are looked for of an evaluation row."""
    if on == PROMPT:
        asked = (text for role, text in turns_of(prompt_turns(row, format)) if role not in _INSTRUCTIONS)
        return [word for text in asked for word in words(text)]
    own = (
        [row[column] for column in required(format)] if on == ROW else list(chosen(row, format, on).values())
    )
    return [word for _, text in turns_of(own) for word in words(text)]


def trained_texts(row: Row, format: str) -> list[str]:
    """Return all that a training row holds, a text a turn."""
    return [text for column in required(format) for _, text in turns_of(row[column])]


def _windows(sequence: Sequence[int], size: int) -> Iterator[int]:
    """Return where runs of `size` words begin that evaluation rows have all of."""
    known = 0
    for end, number in enumerate(sequence, 1):
        known = known + 1 if number else 0
        if known >= size:
            yield end - size


def _longest(places: Sequence[tuple[int, int]], size: int) -> tuple[int, int]:
    """Join runs that follow each other in both rows; return the length of the longest run and where it begins.

    Args:
        places: How much later a run begins in the training row, and where in the evaluation row; sorted.
        size: Words in a run.
    """
    best, begin = (0, 0), 0
    previous = None
    for shift, place in places:
        if previous != (shift, place - 1):
            begin = place
        best = max(best, (place + size - begin, -begin))
        previous = shift, place
    return best[0], -best[1]
