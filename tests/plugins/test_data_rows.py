from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from posttrain.contracts.format import Column
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages, completion_messages, content_text, tools_of
from posttrain_plugins.data.formats import infer_format, row_problem, schema_of
from posttrain_plugins.data.rows import (
    asked_prompts,
    first_prompt_hash,
    prompt_hash,
    read_rows,
    trained_prompts,
    write_rows,
)


def test_rows_survive_a_round_trip_and_the_bytes_are_canonical(tmp_path: Path) -> None:
    rows = [
        {"prompt": "é\u2028b", "completion": "x", "z": 1},
        {"completion": "y", "prompt": "q", "a": None, "z": 2},
    ]
    facts = write_rows(tmp_path, rows, "prompt_completion", policy="ab")
    assert read_rows(tmp_path) == rows
    lines = (tmp_path / "rows.jsonl").read_bytes().split(b"\n")
    assert lines[1:] == [b'{"a":null,"completion":"y","prompt":"q","z":2}', b""]
    assert facts.model_dump(exclude={"type"}) == {
        "format": "prompt_completion",
        "columns": ("prompt", "completion", "z"),
        "rows": 2,
        "policy": "ab",
        "conversational": False,
        "calls": False,
        "longest": 4,
        "flaws": {},
        "tokens": None,
        "log_probs": None,
    }
    assert len((tmp_path / "prompts.txt").read_text().splitlines()) == 2


def test_prompt_hash_is_what_its_definition_says() -> None:
    text = json.dumps([["system", "Be brief."], ["user", "Hi"]], separators=(",", ":"))
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    system, user = {"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " Hi "}
    answer = {"role": "assistant", "content": "Hello"}
    assert prompt_hash({"prompt": [system, user]}, "prompt") == expected
    assert prompt_hash({"messages": [system, user, answer]}, "messages") == expected
    assert prompt_hash({"prompt": [system, user], "chosen": "a", "rejected": "b"}, "preference") == expected


def test_a_string_prompt_hashes_as_one_user_turn() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    assert prompt_hash({"prompt": "Hi"}, "prompt") == prompt_hash({"prompt": turns}, "prompt")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert prompt_hash({"prompt": parts}, "prompt") == prompt_hash({"prompt": turns}, "prompt")
    assert prompt_hash({"prompt": "Ho"}, "prompt") != prompt_hash({"prompt": "Hi"}, "prompt")


def test_messages_hash_everything_before_the_last_answer() -> None:
    first = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    second = [*first, {"role": "user", "content": "2"}]
    longer = [*second, {"role": "assistant", "content": "two"}, {"role": "user", "content": "bye"}]
    assert prompt_hash({"messages": longer}, "messages") == prompt_hash({"prompt": second}, "prompt")


def test_the_prompt_of_every_answer_is_listed(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "1"}]
    second = [*first, {"role": "assistant", "content": "one"}, {"role": "user", "content": "2"}]
    row = {"messages": [*second, {"role": "assistant", "content": "two"}]}
    write_rows(tmp_path, [row, {"messages": first}], "messages")
    early, late = (prompt_hash({"prompt": turns}, "prompt") for turns in (first, second))
    lines = (tmp_path / "prompts.txt").read_text().splitlines()
    assert lines == [f"{late} ~{early}", early]
    assert trained_prompts(lines[0].split()) == {early, late}
    assert asked_prompts(lines[0].split()) == {late}
    assert first_prompt_hash(row, "messages") == first_prompt_hash({"messages": first}, "messages") == early


@pytest.mark.parametrize(
    ("row", "format", "expected"),
    [
        ({"text": "a"}, "text", False),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", True),
        ({"prompt": "a", "completion": "b", "tools": []}, "prompt_completion", False),
        ({"prompt": [{"role": "user", "content": "a"}]}, "prompt", True),
        (
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
            "preference",
            True,
        ),
    ],
)
def test_conversations_are_a_fact(
    tmp_path: Path, row: dict[str, object], format: str, expected: bool
) -> None:
    assert write_rows(tmp_path, [row], format).conversational is expected


def test_tools_are_a_list_or_its_json() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tools_of({"tools": tools}) == tools_of({"tools": json.dumps(tools)}) == tools
    assert (
        tools_of({})
        is tools_of({"tools": None})
        is tools_of({"tools": []})
        is tools_of({"tools": ""})
        is None
    )
    for wrong in ("{", "3", ["f"], {"name": "f"}):
        with pytest.raises(DataError, match="column `tools`"):
            tools_of({"tools": wrong})


def test_no_rows_and_unfit_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one row"):
        write_rows(tmp_path, [], "text")
    with pytest.raises(DataError, match=r"row 2: no column `text`; the row has `tex`"):
        write_rows(tmp_path, [{"text": "a"}, {"tex": "b"}], "text")
    with pytest.raises(DataError, match="half a surrogate pair"):
        write_rows(tmp_path, [{"text": "\ud800"}], "text")
    with pytest.raises(DataError, match="row 1: `score` cannot be written as JSON"):
        write_rows(tmp_path, [{"text": "a", "score": float("nan")}], "text")


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        ("text", "text"),
        ("messages id", "messages"),
        ("prompt answer", "prompt"),
        ("prompt completion", "prompt_completion"),
        ("prompt chosen rejected", "preference"),
    ],
)
def test_formats_are_recognised(columns: str, format: str) -> None:
    assert infer_format(named(*columns.split()), "f") == format


def named(*columns: str) -> Mapping[str, Column]:
    return schema_of([dict.fromkeys(columns, "a")]).columns


def test_ambiguous_columns_list_the_candidates() -> None:
    with pytest.raises(DataError) as caught:
        infer_format(named("prompt", "completion", "chosen", "rejected"), "f.jsonl")
    assert "`preference`, `prompt_completion`" in caught.value.message
    assert "format: preference" in str(caught.value.fix)
    with pytest.raises(DataError, match="fit no dataset format") as caught:
        infer_format(named("question", "answer"), "f.jsonl")
    assert "`question`, `answer`" in str(caught.value.found) or "`answer`, `question`" in str(
        caught.value.found
    )


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "format", "problem"),
    [
        ({"prompt": "a", "completion": "  "}, "prompt_completion", "`completion` is empty"),
        ({"prompt": [], "completion": "b"}, "prompt_completion", "`prompt` is an empty list"),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "`prompt` is number, not a string or a list"),
        ({"prompt": None}, "prompt", "`prompt` is null"),
        ({"text": ["a"]}, "text", "`text` is list, not a string"),
        ({"messages": "a"}, "messages", "`messages` is a string, not a list of messages"),
        ({"messages": ["a"]}, "messages", "message 1 is str, not an object"),
        ({"messages": [{"from": "user"}]}, "messages", "message 1 has no `role` (it has `from`)"),
        ({"messages": [{"role": "user"}]}, "messages", "message 1 has no `content`"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages", "a `content` of type int"),
        (
            {"prompt": "a", "chosen": [USER], "rejected": "c"},
            "preference",
            "`chosen` begins with a `user` turn",
        ),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": ""}]},
            "prompt_completion",
            "`completion` has an empty answer",
        ),
    ],
)
def test_unfit_rows_say_why(row: dict[str, object], format: str, problem: str) -> None:
    found = row_problem(row, format)
    assert found is not None
    assert problem in found


def test_a_tool_call_needs_no_content() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    assert row_problem({"prompt": "a", "completion": [call]}, "prompt_completion") is None
    assert content_text(call) == ""


def test_strings_become_turns() -> None:
    assert as_messages("a") == [{"role": "user", "content": "a"}]
    assert completion_messages("b") == [{"role": "assistant", "content": "b"}]
    assert as_messages([USER]) == [USER]


def test_facts_know_of_calls_of_tools(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert write_rows(tmp_path, [{"messages": turns}], "messages").calls is True
    assert write_rows(tmp_path, [{"prompt": "a", "completion": "b"}], "prompt_completion").calls is False
