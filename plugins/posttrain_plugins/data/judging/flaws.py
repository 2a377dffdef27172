"""What is odd about single rows, by name: facts that hand-off rules judge."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posttrain_plugins.data.formats.values import WEIGHT, weight_problem

PAIRED = frozenset({"preference", "three_way"})
"""Formats with a better and a worse answer."""
MESSAGES = "messages"
UNWEIGHABLE = "unusable_weights"
UNMARGINED = "without_margin"
"""Of rows of which others have a margin; none where all have one, or no row has."""
_SETTING = ("system", "developer")
"""Turns that set the scene rather than speak."""
_PROMPTS = ("system", "system_prompt")
"""Columns that other tools turn into a system message."""
SCORES = (
    ("chosen_reward", "rejected_reward"),
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
)
"""Columns that hold what the two sides of a pair were worth to whoever ranked them."""


def flaws_of(row: Mapping[str, Any], format: str) -> Iterator[str]:
    """Yield the flaws of a row that suits the format.

    `identical_pairs`: both sides of a pair are the same. `inverted_pairs`: the rejected side has the better score.
    `answers_first`: the assistant speaks first in a conversation. `unusable_weights`: a column `weight` holds something
    else than a finite number of at least 0.
    """
    if WEIGHT in row and weight_problem(row, WEIGHT):
        yield UNWEIGHABLE
    if format == MESSAGES:
        turns = (turn["role"] for turn in row["messages"])
        if next((role for role in turns if role not in _SETTING), None) == "assistant":
            yield "answers_first"
    if format not in PAIRED:
        return
    if row["chosen"] == row["rejected"]:
        yield "identical_pairs"
    if any(_number(row.get(better)) < _number(row.get(worse)) for better, worse in SCORES):
        yield "inverted_pairs"


def turned_round(columns: Collection[str]) -> str:
    """Return the option that swaps the sides of pairs; scores move with them, or they would disagree again."""
    pairs = [pair for pair in SCORES if set(pair) <= set(columns)]
    swapped = [f"{one}: {other}, {other}: {one}" for one, other in (("chosen", "rejected"), *pairs)]
    return f"`columns: {{{', '.join(swapped)}}}`"


def unused_system(row: Mapping[str, Any]) -> str | None:
    """Return the column of a canonical row that holds a system prompt, of which no turn is made; None without one.

    Nothing is missing where the row begins with such a turn, or is a plain text.
    """
    begin = row.get("messages", row.get("prompt"))
    if begin is None or (isinstance(begin, list) and begin and begin[0]["role"] in _SETTING):
        return None
    return next((name for name in _PROMPTS if isinstance(row.get(name), str) and row[name].strip()), None)


def _number(value: Any) -> float:
    """Return a score; NaN, which is less than nothing, where there is none."""
    return float(value) if isinstance(value, int | float) else float("nan")
