"""The format of pairs beside a gold answer."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain_plugins.data.formats import format_of, infer_format, row_problem, schema_of
from posttrain_plugins.data.formats.routes import route, with_turns
from posttrain_plugins.data.judging.flaws import flaws_of

ROW: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c", "gold": "d", "source": "s"}


def become(row: dict[str, Any], to: str) -> list[dict[str, Any]]:
    assert row_problem(row, "three_way") is None
    way = route({"three_way": format_of("three_way"), to: format_of(to)}, "three_way", to)
    rows = [dict(each) for each in way.rows(row)]
    assert [row_problem(each, to) for each in rows] == [None] * len(rows)
    return rows


def test_it_is_recognised_by_its_gold_answers():
    assert infer_format(schema_of([ROW]).columns, "f") == "three_way"
    assert infer_format(schema_of([{**ROW, "gold": 7}]).columns, "f") == "preference"
    plain = {name: value for name, value in ROW.items() if name != "gold"}
    assert infer_format(schema_of([{**plain, "reference": "d"}]).columns, "f") == "preference"


def test_its_passages_are_the_three_answers():
    passages = format_of("three_way").passages(ROW)
    assert [(each.role, each.prompt, each.completion) for each in passages] == [
        ("chosen", "a", "b"),
        ("rejected", "a", "c"),
        ("gold", "a", "d"),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"gold": ""}, "`gold` is empty"),
        ({"gold": None}, "`gold` is null"),
        ({"chosen": " "}, "`chosen` is empty"),
        ({"gold": [{"role": "user", "content": "a"}]}, "`gold` begins with a `user` turn"),
    ],
)
def test_rows_that_cannot_be_used(change: dict[str, Any], problem: str):
    assert (row_problem({**ROW, **change}, "three_way") or "").startswith(problem)


def test_a_row_without_a_gold_answer():
    row = {name: value for name, value in ROW.items() if name != "gold"}
    assert "no column `gold`" in str(row_problem(row, "three_way"))


def test_what_it_becomes():
    assert become(ROW, "preference") == [{"prompt": "a", "chosen": "b", "rejected": "c", "source": "s"}]
    assert become(ROW, "prompt_completion") == [{"prompt": "a", "completion": "d", "source": "s"}]
    assert become(ROW, "prompt") == [{"prompt": "a", "source": "s"}]
    (chat,) = become(ROW, "messages")
    assert [turn["content"] for turn in chat["messages"]] == ["a", "d"]


def test_its_strings_become_turns_and_those_of_a_column_that_travels_along_do_not():
    made = with_turns(ROW)
    assert [made[name][0]["content"] for name in ("prompt", "chosen", "rejected", "gold")] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert with_turns({"prompt": "a", "completion": "b", "gold": "d"})["gold"] == "d"


def test_pairs_of_the_same_answer_are_counted_as_in_preferences():
    assert list(flaws_of({**ROW, "rejected": "b"}, "three_way")) == ["identical_pairs"]
    assert list(flaws_of({**ROW, "score_chosen": 1, "score_rejected": 2}, "three_way")) == ["inverted_pairs"]
