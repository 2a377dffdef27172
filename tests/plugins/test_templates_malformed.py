"""Answers that are malformed, cut off or written in another way."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.response_cases import (
    MESSAGES,
    READS,
    TOOLS,
    completion,
    parser,
    template,
)

from posttrain_plugins.templates.responses import parser_for

GOOD = '<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>'

DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

MALFORMED: list[tuple[str, str, str, int]] = [
    ("hermes", "<think>\nHm", "the reasoning never ends: there is no `</think>`", 0),
    ("hermes", "Hm</think>\n\nx", "`</think>` closes reasoning that nothing opened", 0),
    (
        "hermes",
        '<tool_call>\n{"name": "note", "argu',
        "a tool call never ends: there is no `</tool_call>`",
        0,
    ),
    ("hermes", '<tool_call>\n{"name": "note"}\n</tool_call>', "a tool call has no `arguments`", 0),
    (
        "hermes",
        '<tool_call>{"name": "note", "arguments": "x"}</tool_call>',
        "`note` are not a JSON object",
        0,
    ),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "a tool call has no name", 0),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "a tool call has no name", 0),
    ("hermes", "<tool_call>[1]</tool_call>", "a tool call is not a JSON object", 0),
    ("hermes", "<tool_call>{'name': 'note'}</tool_call>", "a tool call is not valid JSON", 0),
    ("hermes", "<tool_call></tool_call>", "a tool call is not valid JSON", 0),
    ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "key `name` twice", 0),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        "holds NaN, which is not JSON",
        0,
    ),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}} x</tool_call>', "text follows the JSON", 0),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "a tool call is not valid JSON", 0),
    ("hermes", GOOD + "\nand so", "text follows a tool call: 'and so'", 1),
    ("hermes", GOOD + "\n<tool_call>x</tool_call>", "a tool call is not valid JSON", 1),
    ("qwen-coder", "<tool_call>\n<function=note>\n<parameter=a>\n1\n", "a tool call never ends", 0),
    ("qwen-coder", "<tool_call>\n<function=note>\n</tool_call>", "no `<function=name>` that is closed", 0),
    (
        "qwen-coder",
        "<tool_call>\n<function=note>\nx\n</function>\n</tool_call>",
        "arguments of `note` are cut off or hold stray text",
        0,
    ),
    ("glm", "<tool_call>note\n<arg_key>a</arg_key>\n</tool_call>", "are cut off or hold stray text", 0),
    (
        "glm",
        "<tool_call>note" + 2 * "\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>" + "\n</tool_call>",
        "`note` has the argument `a` twice",
        0,
    ),
    ("glm", "<tool_call>\n</tool_call>", "a tool call has no name", 0),
    ("deepseek", DEEP.format("function note {}"), "a tool call has no `<｜tool▁sep｜>`", 0),
    (
        "deepseek",
        DEEP.format("function<｜tool▁sep｜>note\n```json\n{\n```"),
        "a tool call is not valid JSON",
        0,
    ),
    (
        "deepseek",
        DEEP.format("note<｜tool▁sep｜>{}").removesuffix("<｜tool▁calls▁end｜>"),
        "list of tool calls",
        1,
    ),
    ("deepseek", DEEP.format("note<｜tool▁sep｜>{}") + "x", "text follows the tool calls: 'x'", 1),
    ("llama", '{"name": "note", "parameters": {"a"', "a tool call is not valid JSON", 0),
    ("llama", '{"name": "note", "parameters": []}', "are not a JSON object", 0),
    ("llama", '{"name": "note", "parameters": {}} and', "this is no tool call: 'and'", 0),
    ("llama", "<|python_tag|>print(1)", "this is no tool call: 'print(1)'", 0),
    ("llama", "<|python_tag|>search.call(query=open('x'))", "an argument of `search` is no literal", 0),
    ("llama", "<|python_tag|>search.call(query={[]: 1})", "an argument of `search` is no literal", 0),
    ("llama", "<|python_tag|>search.call(query=b'x')", "an argument of `search` is no literal", 0),
    ("llama", "<|python_tag|>search.call(a=1, a=2)", "`search` has an argument twice", 0),
    ("llama", "<|python_tag|>search.call(**{'a': 1})", "or one without a name", 0),
    ("llama", "<|python_tag|>", "nothing follows `<|python_tag|>`", 0),
    ("mistral", '[TOOL_CALLS] [{"name": "note", "arguments": {}', "a tool call is not valid JSON", 0),
    ("mistral", "[TOOL_CALLS] []", "is followed by no list of calls", 0),
    ("mistral", "[TOOL_CALLS]note[ARGS]{", "a tool call is not valid JSON", 0),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "a tool call has no name", 0),
    ("mistral", "[THINK]Hm", "the reasoning never ends: there is no `[/THINK]`", 0),
    ("harmony", "<|channel|>analysis<|message|>Hm", "the answer ends with reasoning", 0),
    ("harmony", "<|channel|>analysis", "a message has no `<|message|>`", 0),
    ("harmony", "<|channel|>thought<|message|>x<|return|>", "or has no known channel", 0),
    ("harmony", "Salt water.", "a message has no `<|message|>`", 0),
    (
        "harmony",
        " to=functions.note<|channel|>commentary json<|message|>{",
        "a tool call is not valid JSON",
        0,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>x<|return|>",
        "a message in the channel analysis never ends",
        0,
    ),
]


@pytest.mark.parametrize(("family", "text", "problem", "calls"), MALFORMED)
def test_what_is_malformed_is_reported_and_kept(family: str, text: str, problem: str, calls: int) -> None:
    parsed = parser(family).parse(text)
    assert len(parsed.problems) == 1 and problem in parsed.problems[0]
    assert len(parsed.message.get("tool_calls", ())) == calls
    kept = parsed.message["content"] + parsed.message.get("reasoning_content", "")
    assert "Hm" not in text or "Hm" in kept
    about = text.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>").strip()
    assert calls or "call" not in problem or about in kept


def test_other_ways_to_write_a_call() -> None:
    def functions(family: str, text: str, opened: bool = False) -> tuple[Any, list[Any]]:
        parsed = parser(family, opened).parse(text)
        assert parsed.problems == ()
        calls = [
            (made["function"]["name"], made["function"]["arguments"])
            for made in parsed.message.get("tool_calls", ())
        ]
        return parsed.message["content"], calls

    assert functions("deepseek", "Hm</think>x" + DEEP.format('note<｜tool▁sep｜>{"a": 1}'), True) == (
        "x",
        [("note", {"a": 1})],
    )
    assert functions("llama", '<|python_tag|>{"name": "note", "parameters": {"a": 1}}<|eom_id|>') == (
        "",
        [("note", {"a": 1})],
    )
    two = '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}'
    assert functions("llama", two) == ("", [("a", {}), ("b", {})])
    assert functions("llama", 'x<|python_tag|>brave_search.call(query="a \\"b\\"", n=2)') == (
        "x",
        [("brave_search", {"query": 'a "b"', "n": 2})],
    )
    assert functions("llama", '{"name": "Bob", "age": 3}') == ('{"name": "Bob", "age": 3}', [])
    assert functions("llama", "{x}") == ("{x}", [])
    named = 'x[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{"b": 1}[TOOL_CALLS]c[ARGS]{}</s>'
    assert functions("mistral", named) == ("x", [("a", {"b": 1}), ("c", {})])
    assert parser("mistral").parse(named).message["tool_calls"][0]["id"] == "123456789"
    thought = parser("mistral").parse("[THINK]Hm[/THINK]x")
    assert thought.message == {"role": "assistant", "content": "x", "reasoning_content": "Hm"}
    harmony = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.note <|constrain|>json<|message|>{}<|call|>"
    )
    assert functions("harmony", harmony) == ("Wait.", [("note", {})])
    assert parser("harmony").parse(harmony).message["reasoning_content"] == "a\nb"
    assert functions("harmony", "<|channel|>final<|message|>Cut") == ("Cut", [])


@pytest.mark.parametrize("name", [name for name in READS if READS[name][0] != "plain"])
def test_answers_that_are_cut_off_never_crash_and_lose_nothing(name: str) -> None:
    chat = template(name)
    found = parser_for(chat)
    kind = "all" if "all" in READS[name][1] else "call"
    text = completion(chat, MESSAGES[kind])
    for cut in range(0, len(text), 3):
        parsed = found.parse(text[:cut], TOOLS)
        made = [each["function"] for each in parsed.message.get("tool_calls", ())]
        whole = [each["function"] for each in MESSAGES[kind]["tool_calls"]]
        assert made == whole[: len(made)]
        begun = any(
            mark in text[:cut] for mark in ("<tool_call>", "[TOOL_CALLS]", "▁begin｜>", '{"name"', "json<")
        )
        assert parsed.problems or not begun or made
