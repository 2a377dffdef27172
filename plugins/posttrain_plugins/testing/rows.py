"""Rows of every canonical format, ragged and short, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rows = list[dict[str, Any]]


def completion_rows(count: int = 10) -> Rows:
    """Answers of ragged lengths, from one to many tokens."""
    return [{"prompt": f"say {i}:", "completion": "ab" * (1 + i * 3 % 8) + str(i)} for i in range(count)]


def preference_rows(count: int = 6) -> Rows:
    """A better and a worse answer, now this one longer, now that, with who wrote it and how sure the preference is."""
    return [
        {
            "prompt": f"q{i}",
            "chosen": "yes" * (1 + i % 4),
            "rejected": "no" * (1 + i * 5 % 7),
            "chosen_by": "reference" if i % 3 == 1 else "policy",
            "preference": 0.5 + i % 5 / 8,
        }
        for i in range(count)
    ]


def three_way_rows(count: int = 6) -> Rows:
    """A pair and a gold answer."""
    return [{**row, "gold": "sure" * (1 + i * 2 % 3)} for i, row in enumerate(preference_rows(count))]


def unpaired_rows(count: int = 6) -> Rows:
    """Answers, two of three good."""
    return [{**row, "label": i % 3 > 0} for i, row in enumerate(completion_rows(count))]


def scored_rows(count: int = 6) -> Rows:
    """Answers with a number each."""
    return [{**row, "score": i % 4 - 1.5} for i, row in enumerate(completion_rows(count))]


def ranked_rows(count: int = 6) -> Rows:
    """Two to four answers to each prompt, with a number each."""
    return [
        {
            "prompt": f"q{i}",
            "completions": ["no", "maybe so", "yes" * (1 + i % 3), "?"][: 2 + i % 3],
            "scores": [0.0, 1.5, 2.0, -1.0][: 2 + i % 3],
        }
        for i in range(count)
    ]


def stepwise_rows(count: int = 6) -> Rows:
    """Answers of one to three steps, some of them wrong."""
    return [
        {
            "prompt": f"count to {i}",
            "completions": ["one\n", "two and a half\n", "done"][-1 - i % 3 :],
            "labels": [True, False, i % 2 == 0][-1 - i % 3 :],
        }
        for i in range(count)
    ]


def message_rows(count: int = 10) -> Rows:
    """Conversations of one turn each."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in completion_rows(count)
    ]


def text_rows(count: int = 10) -> Rows:
    """Texts of ragged lengths."""
    return [{"text": f"{i} ab" * (1 + i * 3 % 8)} for i in range(count)]


ROWS: Mapping[str, Callable[[int], Rows]] = {
    "prompt_completion": completion_rows,
    "preference": preference_rows,
    "three_way": three_way_rows,
    "unpaired_preference": unpaired_rows,
    "scored": scored_rows,
    "ranked": ranked_rows,
    "stepwise": stepwise_rows,
    "text": text_rows,
    "messages": message_rows,
}
"""So many rows of every format that a trainer may take."""
