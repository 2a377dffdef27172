from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.contexts import catalogue

from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group
from posttrain.errors import DataError
from posttrain_plugins.data.formats import (
    BUILT_IN,
    CANONICAL,
    format_of,
    infer_format,
    meant,
    passage_of,
    row_problem,
    schema_of,
)
from posttrain_plugins.data.formats.inference import misleading
from posttrain_plugins.data.formats.nicknames import NICKNAMES
from posttrain_plugins.data.formats.routes import route, with_turns

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}

NAMED = {"scored": "prompt_completion"}
"""What rows of formats that have to be named are taken for."""

SAMPLES: dict[str, list[Row]] = {
    "text": [{"text": "a b"}],
    "messages": [{"messages": [user("a"), said("b")], "tools": [TOOL]}],
    "prompt": [{"prompt": "a", "answer": "b"}],
    "prompt_completion": [{"prompt": [user("a")], "completion": [said("b")], "label": "easy"}],
    "preference": [{"prompt": [user("a")], "chosen": [said("b")], "rejected": [said("c")]}],
    "unpaired_preference": [{"prompt": "a", "completion": "b", "label": False}],
    "three_way": [{"prompt": "a", "chosen": "b", "rejected": "c", "gold": "d"}],
    "scored": [{"prompt": "a", "completion": "b", "score": 0.5}],
    "ranked": [{"prompt": "a", "completions": ["b", [said("c")]], "scores": [2, 1.5]}],
    "stepwise": [{"prompt": "a", "completions": ["b", "c"], "labels": [True, 0.25]}],
    "implicit_preference": [{"chosen": [user("a"), said("b")], "rejected": [user("a"), said("c")]}],
    "full_preference": [
        {
            "prompt": "a",
            "chosen": [user("a"), said("b")],
            "rejected": [user("a"), said("c")],
            "score_chosen": 8.5,
        }
    ],
    "hh_rlhf": [
        {
            "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
            "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e",
        }
    ],
    "alpaca": [{"instruction": "add", "input": "1 2", "output": "3"}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
    "sharegpt_preference": [
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        }
    ],
    "openai_chat": [
        {"messages": [user("a"), said("b", weight=0)], "parallel_tool_calls": False, "tools": [TOOL]}
    ],
    "openai_preference": [
        {
            "input": {"messages": [user("a")], "tools": [TOOL]},
            "preferred_output": [said("b")],
            "non_preferred_output": [said("c")],
        }
    ],
    "ultrafeedback": [
        {
            "instruction": "a",
            "completions": [
                {"model": "x", "response": "b", "overall_score": 2.5},
                {"model": "y", "response": "c", "overall_score": 9.0},
                {"model": "z", "response": "d", "overall_score": 2.5},
            ],
        }
    ],
}


def made(format: str, row: Row) -> list[Row]:
    assert row_problem(row, format) is None
    return [dict(each) for each in format_of(format).rows(row)]


def test_there_is_a_sample_of_every_format() -> None:
    assert set(SAMPLES) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_format_is_recognised_and_becomes_a_canonical_one(name: str) -> None:
    rows = SAMPLES[name]
    assert infer_format(schema_of(rows).columns, "f") == NAMED.get(name, name)
    canonical = format_of(name).becomes or name
    assert canonical in CANONICAL
    for row in rows:
        for each in made(name, row):
            assert row_problem(each, canonical) is None
            assert format_of(name).passages(row) == format_of(canonical).passages(each)


def test_what_foreign_rows_become() -> None:
    assert made("alpaca", SAMPLES["alpaca"][0]) == [
        {"prompt": [user("add\n\n1 2")], "completion": [said("3")]}
    ]
    asked = {"role": "system", "content": "S"}
    full = {"instruction": "add", "input": "", "output": "3", "system": "S", "history": [["q", "r"]], "id": 7}
    assert made("alpaca", full) == [
        {"id": 7, "prompt": [asked, user("q"), said("r"), user("add")], "completion": [said("3")]}
    ]
    assert made("hh_rlhf", SAMPLES["hh_rlhf"][0]) == [
        {"prompt": [user("a"), said("b"), user("c")], "chosen": [said("d")], "rejected": [said("e")]}
    ]
    assert made("implicit_preference", SAMPLES["implicit_preference"][0]) == SAMPLES["preference"]
    assert made("full_preference", SAMPLES["full_preference"][0]) == [
        {**SAMPLES["preference"][0], "score_chosen": 8.5}
    ]
    assert made("sharegpt_preference", SAMPLES["sharegpt_preference"][0]) == SAMPLES["preference"]
    assert made("openai_preference", SAMPLES["openai_preference"][0]) == [
        {**SAMPLES["preference"][0], "tools": [TOOL]}
    ]
    assert made("ultrafeedback", SAMPLES["ultrafeedback"][0]) == [
        {
            "prompt": [user("a")],
            "chosen": [said("c")],
            "rejected": [said("b")],
            "score_chosen": 9.0,
            "score_rejected": 2.5,
        }
    ]


def test_equal_ratings_give_no_pair() -> None:
    row = {
        "instruction": "a",
        "completions": [{"response": "b", "rating": "4"}, {"response": "c", "rating": "4"}],
    }
    assert made("ultrafeedback", row) == []
    assert "no score" in str(
        row_problem({"instruction": "a", "completions": [{"response": "b"}]}, "ultrafeedback")
    )


def test_sharegpt_speakers_calls_and_system() -> None:
    row = {
        "system": "S",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "a", "weight": 0},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "9"},
            {"from": "gpt", "value": "b"},
        ],
    }
    (found,) = made("sharegpt", row)
    assert found["messages"] == [
        {"role": "system", "content": "S"},
        {**user("a"), "weight": 0},
        said("", tool_calls=[CALL]),
        {"role": "tool", "content": "9"},
        said("b"),
    ]
    assert found["tools"] == row["tools"]


def test_openai_arguments_functions_and_refusals() -> None:
    old = {"name": "f", "arguments": '{"x": 1}'}
    row = {
        "functions": [TOOL["function"]],
        "messages": [
            user("a"),
            {"role": "assistant", "content": None, "function_call": old},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": None, "refusal": "I cannot."},
            said("b", refusal=None, tool_calls=[{"id": "1", "type": "function", "function": old}]),
        ],
    }
    (found,) = made("openai_chat", row)
    assert found["tools"] == [TOOL]
    assert "functions" not in found
    assert found["messages"][1]["tool_calls"] == [CALL]
    assert found["messages"][3] == said("I cannot.")
    assert found["messages"][4] == said("b", tool_calls=[{"id": "1", **CALL}])


SHARED = [user("a"), said("b"), user("c")]


@pytest.mark.parametrize(
    ("format", "row", "problem"),
    [
        ("implicit_preference", {"chosen": SHARED, "rejected": [*SHARED, said("d")]}, "`chosen` ends where"),
        (
            "implicit_preference",
            {"chosen": [*SHARED, said("d")], "rejected": [user("a"), said("b"), user("e"), said("f")]},
            "message 3, a `user` turn",
        ),
        ("implicit_preference", {"chosen": [said("a")], "rejected": [said("b")]}, "share no history"),
        ("full_preference", {"prompt": "z", **SAMPLES["implicit_preference"][0]}, "`prompt` is no user turn"),
        ("hh_rlhf", {"chosen": "a", "rejected": "b"}, "other strings need a column `prompt`"),
        (
            "hh_rlhf",
            {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"},
            "empty answer",
        ),
        ("alpaca", {"instruction": "a", "output": " "}, "`output` is empty"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["c"]}, "`history` is not a list of pairs"),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "turn 1 is from `narrator`"),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "turn 1 has no `from`"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "{"}]}, "not valid JSON"),
        (
            "openai_chat",
            {"messages": [said("a", tool_calls=[{"id": "1"}])]},
            "tool call without a `function`",
        ),
        ("openai_chat", {"messages": [said("a", refusal="b")]}, "both a `content` and a `refusal`"),
        (
            "scored",
            {"prompt": "a", "completion": "b", "score": "7"},
            '`score` is the string "7", not a number',
        ),
        ("scored", {"prompt": "a", "completion": "b", "score": True}, "`score` is boolean, not a number"),
        ("scored", {"prompt": "a", "completion": "b", "score": float("nan")}, "not a finite number"),
        ("scored", {"prompt": "a", "completion": "", "score": 1}, "`completion` is empty"),
        ("ranked", {"prompt": "a", "completions": ["b"], "scores": [1]}, "two or more"),
        (
            "ranked",
            {"prompt": "a", "completions": ["b", "c"], "scores": [1]},
            "1 entries for 2 `completions`",
        ),
        ("ranked", {"prompt": "a", "completions": ["b", ""], "scores": [1, 2]}, "entry 2 is empty"),
        ("ranked", {"prompt": "a", "completions": ["b", "c"], "scores": [1, None]}, "entry 2 is null"),
        ("ranked", {"prompt": "a", "completions": "b", "scores": [1, 2]}, "is string, not a list"),
        ("stepwise", {"prompt": "a", "completions": ["b"], "labels": []}, "0 entries for 1 `completions`"),
        ("stepwise", {"prompt": "a", "completions": ["b"], "labels": [1.5]}, "a probability is from 0 to 1"),
        (
            "stepwise",
            {"prompt": "a", "completions": ["b", [said("c")]], "labels": [1, 1]},
            "step 2 is a list",
        ),
        (
            "unpaired_preference",
            {"prompt": "a", "completion": "b", "label": 1},
            "`label` is the number 1, not true or false",
        ),
        ("prompt", {"prompt": "a", "tools": "{"}, "`tools` is not valid JSON"),
        ("prompt", {"prompt": "a", "chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
        ("prompt", {"prompt": "a", "image": "x", "images": ["y"]}, "both `image` and `images`"),
        ("messages", {"messages": [said("a", weight=0.5)]}, "`weight` of 0.5"),
        ("messages", {"messages": [said("", tool_calls=[{"function": {}}])]}, "tool call 1 without a name"),
        ("messages", {"messages": [{"role": "user", "content": [3]}]}, "part 1 of its `content` is number"),
    ],
)
def test_what_is_wrong_with_a_row(format: str, row: Row, problem: str) -> None:
    found = row_problem(row, format)
    assert found is not None
    assert problem in found


def test_pairs_of_whole_conversations_part_where_they_differ() -> None:
    deep = {"chosen": [*SHARED, said("d")], "rejected": [*SHARED, said("e"), user("f"), said("g")]}
    assert made("implicit_preference", deep) == [
        {"prompt": SHARED, "chosen": [said("d")], "rejected": [said("e"), user("f"), said("g")]}
    ]
    same = {"chosen": [*SHARED, said("d")], "rejected": [*SHARED, said("d")]}
    assert made("implicit_preference", same) == [
        {"prompt": SHARED, "chosen": [said("d")], "rejected": [said("d")]}
    ]


def test_the_whole_schema_decides() -> None:
    plain = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert infer_format(schema_of([plain]).columns, "f") == "preference"
    turns = [{"prompt": "a", "chosen": [said("b")], "rejected": [said("c")]}] * 9
    assert infer_format(schema_of(turns).columns, "f") == "preference"
    late = [*turns, SAMPLES["full_preference"][0]]
    assert infer_format(schema_of(late).columns, "f") == "full_preference"
    refusals = [{"messages": [user("a"), said("b")]}] * 9 + [
        {"messages": [user("a"), said("b", refusal=None)]}
    ]
    assert infer_format(schema_of(refusals).columns, "f") == "openai_chat"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((True, False), "unpaired_preference"),
        ((1, 0), "unpaired_preference"),
        ((None, True), "unpaired_preference"),
        ((None, None), "prompt_completion"),
        (("maths", "code"), "prompt_completion"),
        (("true", "false"), "unpaired_preference"),
        (("0", "maths"), "unpaired_preference"),
    ],
)
def test_labels_that_may_be_verdicts_never_make_demonstrations(labels: Any, expected: str) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in labels]
    assert infer_format(schema_of(rows).columns, "here") == expected
    problem = row_problem(rows[0], expected)
    refused = labels[0] in (1, "true", "0") and labels[0] is not True
    assert ("choose `format: prompt_completion`" in str(problem)) is refused


@pytest.mark.parametrize(
    "columns", [("prompt", "completions"), ("prompt", "chosen"), ("prompt", "rejected", "x")]
)
def test_what_is_left_of_another_format_is_no_prompt(columns: tuple[str, ...]) -> None:
    rows = [dict.fromkeys(columns, "a")]
    with pytest.raises(DataError, match="fit no dataset format") as caught:
        infer_format(schema_of(rows).columns, "here")
    lacking = {"completions": "`stepwise` lacks `labels`", "chosen": "`preference` lacks `rejected`"}
    assert lacking.get(columns[1], "`preference` lacks `chosen`") in caught.value.message


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("kto", "`unpaired_preference`"),
        ("unpaired", "`unpaired_preference`"),
        ("dpo", "`preference`"),
        ("train.orpo", "`preference`"),
        ("reward", "`preference` or `scored` or `ranked`"),
        ("sft", "`prompt_completion` or `messages`"),
        ("prompt-only", "`prompt`"),
        ("unpaired preference", "`unpaired_preference`"),
        ("prefrence", "`preference`"),
    ],
)
def test_other_names_of_formats(name: str, formats: str) -> None:
    assert meant(name, CANONICAL) == f"did you mean {formats}?"
    with pytest.raises(DataError, match="unknown dataset format") as caught:
        format_of(name)
    assert caught.value.fix == f"did you mean {formats}?"


def test_every_trainer_s_name_stands_for_a_format_that_it_takes() -> None:
    for uses in catalogue().names(Group.TRAINER):
        if "/" not in uses:
            assert NICKNAMES[uses.removeprefix("train.")][0] in catalogue().stage(uses).formats
    assert all(set(formats) <= set(CANONICAL) for formats in NICKNAMES.values())
    assert meant("zzz", CANONICAL) is None


def test_ambiguity_names_the_rows_and_the_choice() -> None:
    rows = [{"text": "a", "instruction": "b", "output": "c"}, {"instruction": "b", "output": "c"}]
    schema = schema_of(rows)
    with pytest.raises(DataError, match="`alpaca`, `text`") as caught:
        infer_format(schema.columns, "f.jsonl", schema.told())
    assert "1 row with `text`, `instruction`, `output`, from row 1" in str(caught.value.found)
    assert "1 row with `instruction`, `output`, from row 2" in str(caught.value.found)
    assert caught.value.fix == (
        "choose one, for example `format: alpaca`: `alpaca` learns the answer to the prompt; "
        "`text` learns all of the text; other columns travel along unused"
    )


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": [user("a")]}, "preference", {"messages"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, "preference", set()),
        ({"prompt": "a", "completion": "b", "label": True}, "prompt_completion", {"label"}),
        ({"prompt": "a", "completion": "b", "label": "spam"}, "prompt_completion", set()),
        ({"messages": [user("a"), said("b")], "source": "x"}, "messages", set()),
    ],
)  # fmt: skip
def test_columns_that_mislead(row: dict[str, Any], name: str, expected: set[str]) -> None:
    assert misleading(BUILT_IN, row, name) == expected
    rest = {column: value for column, value in row.items() if column not in expected}
    assert infer_format(schema_of([rest]).columns, "here") == name


def test_passages_hold_what_stands_beside_the_texts() -> None:
    row = {
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": '{"enable_thinking": false}',
        "images": ["a.png"],
    }
    passage = passage_of(row, "chosen", [user("a")], [said("b")])
    assert passage == Passage(
        "chosen", [user("a")], [said("b")], [TOOL], {"enable_thinking": False}, ("a.png",)
    )
    assert passage_of({"tools": [], "image": None}, "completion", "a", "b") == Passage("completion", "a", "b")
    mixed = passage_of({}, "completion", "a", [said("b")])
    assert mixed.prompt == [user("a")]
    chosen, rejected = format_of("preference").passages(SAMPLES["preference"][0])
    assert (chosen.role, rejected.role) == ("chosen", "rejected")
    assert format_of("messages").passages(SAMPLES["messages"][0])[0].prompt is None
    assert format_of("prompt").passages({"prompt": "a"})[0].completion is None


def test_two_tools_with_different_parameters_stay_as_they_are() -> None:
    first = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"default": None}}}},
    }
    second = {
        "type": "function",
        "function": {"name": "g", "parameters": {"properties": {"b": {"enum": [None]}}}},
    }
    row = {"messages": [user("a"), said("b")], "tools": [first, second]}
    assert format_of("messages").passages(row)[0].tools == [first, second]
    text = {**row, "tools": json.dumps([first, second])}
    assert format_of("messages").passages(text)[0].tools == [first, second]


FORMATS = {name: format_of(name) for name in CANONICAL}


def become(row: Row, source: str, target: str, **options: Any) -> list[Row]:
    return [dict(each) for each in route(FORMATS, source, target, **options).rows(row)]


def test_conversions() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "id": 1}
    ranked = {"prompt": "q", "completions": ["b", "c", "d"], "scores": [1, 3, 0], "id": 1}
    assert become(ranked, "ranked", "preference") == [
        {"prompt": "q", "chosen": "c", "rejected": "d", "id": 1}
    ]
    assert become({**ranked, "scores": [2, 2, 2]}, "ranked", "preference") == []
    assert become(ranked, "ranked", "scored")[0] == {"prompt": "q", "completion": "b", "score": 1, "id": 1}
    assert become(ranked, "ranked", "prompt") == [{"prompt": "q", "id": 1}]
    scored = {"prompt": "q", "completion": "b", "score": 1}
    assert become(scored, "scored", "prompt_completion") == [{"prompt": "q", "completion": "b"}]
    assert become(pair, "preference", "unpaired_preference") == [
        {"prompt": "a", "id": 1, "completion": "b", "label": True},
        {"prompt": "a", "id": 1, "completion": "c", "label": False},
    ]
    assert become(pair, "preference", "prompt_completion") == [{"prompt": "a", "id": 1, "completion": "b"}]
    assert become(pair, "preference", "prompt") == [{"prompt": "a", "id": 1}]
    assert become(pair, "preference", "messages") == [{"id": 1, "messages": [user("a"), said("b")]}]
    for label, count in ((True, 1), (False, 0)):
        row = {"prompt": "a", "completion": "b", "label": label}
        assert len(become(row, "unpaired_preference", "prompt_completion")) == count
    steps = {"prompt": "a", "completions": ["b", "c"], "labels": [True, 0.4]}
    assert become(steps, "stepwise", "unpaired_preference") == [
        {"prompt": "a", "completion": "b\nc", "label": False}
    ]
    assert become(steps, "stepwise", "messages") == []
    assert become({**steps, "labels": [1, 0.5]}, "stepwise", "messages") == [
        {"messages": [user("a"), said("b\nc")]}
    ]


def test_conversations_become_one_row_or_one_for_every_answer() -> None:
    row = {"messages": [user("a"), said("b"), user("c"), said("d"), user("e")], "id": 1}
    first = {"id": 1, "prompt": [user("a")], "completion": [said("b")]}
    last = {"id": 1, "prompt": [user("a"), said("b"), user("c")], "completion": [said("d")]}
    assert become(row, "messages", "prompt_completion") == [last]
    assert become(row, "messages", "prompt_completion", every_answer=True) == [first, last]
    assert become(row, "messages", "prompt") == [{"id": 1, "prompt": last["prompt"]}]
    assert become({"messages": [user("a")]}, "messages", "prompt_completion") == []
    assert become({"messages": [user("a")]}, "messages", "prompt") == [{"prompt": [user("a")]}]


def test_answers_that_are_not_learned_become_no_completion() -> None:
    asked, wrong, right = user("a"), said("b", weight=0), said("c")
    row = {"messages": [asked, wrong, user("d"), right, user("e"), wrong]}
    (last,) = become(row, "messages", "prompt_completion")
    assert (last["prompt"], last["completion"]) == ([asked, wrong, user("d")], [right])
    assert become(row, "messages", "prompt_completion", every_answer=True) == [last]
    assert become({"messages": [asked, wrong]}, "messages", "prompt_completion") == []


def test_joining_learns_the_completion_alone() -> None:
    row = {"prompt": [user("a"), said("b"), user("c")], "completion": [said("d")]}
    assert become(row, "prompt_completion", "messages") == [
        {"messages": [user("a"), said("b", weight=0), user("c"), said("d")]}
    ]


def test_no_way_to_a_format_lists_the_others() -> None:
    with pytest.raises(DataError, match="`text` rows do not become `preference` rows"):
        route(FORMATS, "text", "preference")
    with pytest.raises(DataError) as caught:
        route(FORMATS, "messages", "preference")
    assert caught.value.expected == "one of `prompt_completion`, `prompt`"


def test_strings_become_turns_in_every_column() -> None:
    assert with_turns({"prompt": "a", "chosen": "b", "rejected": [said("c")], "id": "x"}) == {
        "prompt": [user("a")],
        "chosen": [said("b")],
        "rejected": [said("c")],
        "id": "x",
    }
