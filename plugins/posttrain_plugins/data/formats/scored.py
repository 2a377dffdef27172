"""Answers with numbers that say how good they are: one answer a row, or several to one prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posttrain.contracts.format import Column, Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, passage_of


class Scored(Format):
    """A prompt with a completion and its score; more is better."""

    columns = ("prompt", "completion", "score")
    optional = OPTIONAL
    scalars = {"score": float, values.MARGIN: float}
    conversions = {
        "prompt_completion": conversions.score_left_out,
        "messages": conversions.joined,
        "prompt": conversions.prompt_alone,
    }

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Never: many demonstrations have a score beside them that is no target. The format is named."""
        return False

    def problem(self, row: Row) -> str | None:
        """Refuse an empty side, and a score that is no finite number."""
        judges = {"prompt": values.turns, "completion": values.answer}
        return values.first_problem(row, judges) or scores_problem(row, self.columns) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The pair; the score is the trainer's business."""
        return (passage_of(row, "completion", row["prompt"], row["completion"]),)


class Ranked(Format):
    """A prompt with several completions and a score for each; more is better."""

    columns = ("prompt", "completions", "scores")
    optional = OPTIONAL
    scalars = {values.MARGIN: float}
    conversions = {
        "scored": conversions.each_scored,
        "preference": conversions.best_and_worst,
        "prompt": conversions.prompt_alone,
    }

    def problem(self, row: Row) -> str | None:
        """Refuse less than two completions, and scores that are not one finite number for each."""
        judges = {"prompt": values.turns, "completions": _completions}
        problem = values.first_problem(row, judges) or scores_problem(row, self.columns)
        if problem:
            return problem
        answers, scores = len(row["completions"]), len(row["scores"])
        if answers != scores:
            return f"`scores` has {scores} entries for {answers} `completions`"
        return extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """Each completion, in the row's order."""
        return tuple(
            passage_of(row, "completion", row["prompt"], completion) for completion in row["completions"]
        )


def scores_problem(row: Row, columns: Collection[str]) -> str | None:
    """Say what is wrong with the numbers that a row gives its answers.

    Args:
        row: The row.
        columns: Those that its format needs.
    """
    judges = {column: judge for column, judge in _JUDGES.items() if column in columns}
    return values.first_problem(row, judges)


def _completions(value: Any) -> str | None:
    if isinstance(value, list) and len(value) < 2:
        return f"has {len(value)} entries; to be ranked there must be two or more"
    return values.entries(value, "completions", values.answer)


def _scores(value: Any) -> str | None:
    return values.entries(value, "scores", values.number)


_JUDGES: Mapping[str, values.Judge] = {"score": values.number, "scores": _scores}
"""Columns that say how good answers are."""
