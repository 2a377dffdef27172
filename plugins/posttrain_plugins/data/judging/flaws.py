"""What is odd about single rows, by name: facts that hand-off rules judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PREFERENCE = "preference"
MESSAGES = "messages"
_SETTING = ("system", "developer")
"""Turns that set the scene rather than speak."""
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
    `answers_first`: the assistant speaks first in a conversation.
    """
    if format == MESSAGES:
        turns = (turn["role"] for turn in row["messages"])
        if next((role for role in turns if role not in _SETTING), None) == "assistant":
            yield "answers_first"
    if format != PREFERENCE:
        return
    if row["chosen"] == row["rejected"]:
        yield "identical_pairs"
    if any(_number(row.get(better)) < _number(row.get(worse)) for better, worse in SCORES):
        yield "inverted_pairs"


def _number(value: Any) -> float:
    """Return a score; NaN, which is less than nothing, where there is none."""
    return float(value) if isinstance(value, int | float) else float("nan")
