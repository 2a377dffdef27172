"""Another row's answer to each row's prompt, of which an estimate of the KL divergence is made.

The pairs come from the dataset: neither the batch size nor the order of training changes them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from random import Random
from typing import Any

from posttrain.contracts.format import Row
from posttrain_plugins.preparation.supervision import no_answer

MISMATCHED = "mismatched"
"""The role of the sequence that is made of another row's answer."""
COLUMN = "\0mismatched"
"""The column that rows are given; none of a dataset's own is called that."""
TRIES = 32
"""Draws of a row with another prompt, until one with another answer too is found."""


def with_mismatched(rows: Sequence[Row], seed: int) -> Sequence[Row]:
    """Give each row the completion of another row, in the column `COLUMN`.

    Rows are passed on in a cycle that the seed draws, so that each completion is given away once. A row that would be
    given its own answer, or one to its own prompt, draws again among those with another prompt and another answer;
    where there is none, among those with another answer. Where all rows have the same answer, rows stay as they are. So
    does one whose completion has no assistant turn: it is dropped, and another row should not be dropped with it.

    Args:
        rows: Rows with `prompt` and `completion`.
        seed: Seed of the draws.
    """
    answered = [not no_answer(row["completion"]) for row in rows]
    given = iter(_exchanged(list(compress(rows, answered)), Random(f"mismatched:{seed}")))
    return [next(given) if fits else row for row, fits in zip(rows, answered, strict=True)]


def _exchanged(rows: Sequence[Row], random: Random) -> Sequence[Row]:
    prompts = _Groups.of([_text(row["prompt"]) for row in rows])
    answers = _Groups.of([_text(row["completion"]) for row in rows])
    if answers.number < 2:
        return rows
    cycle = random.sample(range(len(rows)), len(rows))
    following = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    return [
        {**row, COLUMN: rows[_donor(at, following[at], prompts, answers, random)]["completion"]}
        for at, row in enumerate(rows)
    ]


def _donor(row: int, first: int, prompts: _Groups, answers: _Groups, random: Random) -> int:
    """Return the row whose answer a row is given."""

    def fits(other: int) -> bool:
        return prompts.of_row[other] != prompts.of_row[row] and answers.of_row[other] != answers.of_row[row]

    if fits(first):
        return first
    for _ in range(TRIES if prompts.number > 1 else 0):
        if fits(other := prompts.another(row, random)):
            return other
    return answers.another(row, random)


@dataclass(frozen=True)
class _Groups:
    """Rows by a value.

    Args:
        of_row: The group of each row.
        ordered: The rows, group by group.
        ends: Where each group begins and ends among these.
    """

    of_row: Sequence[int]
    ordered: Sequence[int]
    ends: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, values: Sequence[Hashable]) -> _Groups:
        numbers: dict[Hashable, int] = {}
        of_row = [numbers.setdefault(value, len(numbers)) for value in values]
        ordered = sorted(range(len(values)), key=of_row.__getitem__)
        ends, end = [], 0
        for _, members in groupby(ordered, of_row.__getitem__):
            start, end = end, end + sum(1 for _ in members)
            ends.append((start, end))
        return cls(of_row, ordered, ends)

    @property
    def number(self) -> int:
        """How many groups there are."""
        return len(self.ends)

    def another(self, row: int, random: Random) -> int:
        """Draw a row of another group; there are at least two groups."""
        start, end = self.ends[self.of_row[row]]
        drawn = random.randrange(len(self.ordered) - (end - start))
        return self.ordered[drawn if drawn < start else drawn + end - start]


def _text(value: Any) -> str:
    """Return what tells turns apart: a string, or messages."""
    return json.dumps(value, sort_keys=True)
