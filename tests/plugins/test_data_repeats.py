"""Flaws of rows, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain_plugins.data.judging.flaws import flaws_of
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.data.similarity.repeats import Repeats


def pair(prompt: str, chosen: str, rejected: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (pair("q", "a", "b"), []),
        (pair("q", "a", "a"), ["identical_pairs"]),
        (pair("q", "a", "b", chosen_score=0.1, rejected_score=0.9), ["inverted_pairs"]),
        (pair("q", "a", "b", chosen_reward=1, rejected_reward=0), []),
        (pair("q", "a", "b", chosen_reward=1, rejected_reward=1), []),
        (pair("q", "a", "b", chosen_reward=0), []),
        (pair("q", "a", "b", score_chosen="low", score_rejected="high"), []),
    ],
)
def test_pairs(row: dict[str, Any], expected: list[str]) -> None:
    assert list(flaws_of(row, "preference")) == expected


@pytest.mark.parametrize(
    ("roles", "first"),
    [("ua", False), ("sua", False), ("a", True), ("sau", True), ("du", False)],
)
def test_who_speaks_first(roles: str, first: bool) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "d": "developer"}
    messages = [{"role": names[each], "content": "x"} for each in roles]
    assert list(flaws_of({"messages": messages}, "messages")) == ["answers_first"] * first


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    repeats = Repeats("preference", ("prompt", "chosen", "rejected"))
    for row in rows:
        repeats.add(row)
    return repeats.counts()


def test_repeats_by_hand() -> None:
    assert counted([pair("q", "a", "b"), pair("r", "a", "b")]) == {}
    assert counted([pair("q", "a", "b", id=1), pair("q", "a", "b", id=2)]) == {"repeated_rows": 1}
    assert counted([pair("q", "a", "b"), pair("q", "b", "a")]) == {"contradicting_pairs": 1}
    assert counted([pair("q", "a", "b"), pair("r", "b", "a")]) == {}, "of another prompt"
    assert counted([pair("q", "a", "a"), pair("q", "a", "a")]) == {"repeated_rows": 1}


@pytest.mark.parametrize(("same", "found"), [(9, {"constant_sides": 9}), (8, {})])
def test_a_side_that_is_nearly_always_the_same(same: int, found: dict[str, int]) -> None:
    rows = [pair(f"q{i}", f"a{i}", "error" if i < same else f"b{i}") for i in range(10)]
    assert counted(rows) == found
    assert counted(rows[:9]) == {}, "too few to tell"


def test_flaws_are_facts_of_the_dataset(tmp_path: Path) -> None:
    rows = [
        pair("q", "yes", "no", chosen_score=0.0, rejected_score=1.0),
        pair("q", "no", "yes", chosen_score=1.0, rejected_score=0.0),
        pair("r", "a", "a"),
    ]
    facts = write_rows(tmp_path, rows, "preference")
    assert facts.flaws == {"contradicting_pairs": 1, "identical_pairs": 1, "inverted_pairs": 1}
    assert facts.longest is not None and facts.longest > 0
    clean = write_rows(tmp_path, [pair("q", "yes", "no")], "preference")
    assert clean.flaws == {}
