"""Rows of which some are copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from posttrain_plugins.data.similarity.duplicates import Copy, Rule, find_copies

Row = dict[str, Any]

PAIR = "prompt_completion"


def pair(prompt: str, completion: str, **others: Any) -> Row:
    return {"prompt": prompt, "completion": completion, **others}


def text(seed: int, count: int = 60) -> str:
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(5000)}" for _ in range(count))


def changed(told: str, *places: int) -> str:
    parts = told.split()
    for place in places:
        parts[place] = "other"
    return " ".join(parts)


def copies(rows: Sequence[Row], format: str = PAIR, **rule: Any) -> list[Copy]:
    return find_copies(rows, format, Rule(**rule))


def planted(count: int) -> tuple[list[Row], list[list[int]]]:
    """Rows of which every tenth has a near copy and every twentieth an equal one."""
    rows = [pair(text(n, 20), text(n + count)) for n in range(count)]
    expected = []
    for n in range(0, count, 10):
        group = [n, len(rows)]
        rows.append(pair(rows[n]["prompt"], changed(rows[n]["completion"], 30)))
        if n % 20 == 0:
            group.append(len(rows))
            rows.append(pair(rows[n]["prompt"].upper(), rows[n]["completion"]))
        expected.append(group)
    return rows, sorted(expected)
