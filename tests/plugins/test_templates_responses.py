"""Answers are read back into messages."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat_templates import OPEN_ENDED, STYLES
from helpers.response_cases import (
    MESSAGES,
    READS,
    SPECIAL,
    TOOLS,
    completion,
    template,
)

from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.responses import parser_for


def expected(message: dict[str, Any], ids: bool) -> dict[str, Any]:
    calls = [
        call if ids else {key: call[key] for key in ("type", "function")}
        for call in message.get("tool_calls", ())
    ]
    return {"role": "assistant", **message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("name", READS)
def test_messages_come_back(name: str) -> None:
    chat = template(name)
    parser = parser_for(chat)
    family, kinds = READS[name]
    assert parser.family.name == family
    for kind in MESSAGES:
        if kind not in kinds:
            continue
        text = completion(chat, MESSAGES[kind], parts=name == "trl/smolvlm")
        for shown in (text, text.rstrip("\n")):
            parsed = parser.parse(shown, TOOLS)
            assert parsed.problems == (), (kind, shown)
            assert parsed.message == expected(MESSAGES[kind], family == "mistral"), (kind, shown)


def test_what_is_read_is_known() -> None:
    assert parser_for(template("qwen-3")).reads >= {"content", "reasoning", "call", "several calls"}
    assert parser_for(template("llama-3.1")).reads == {"content", "call"}
    assert parser_for(template("qwen-3")).reason is None
    assert parser_for(template("chatml")).reason == "the template writes neither tool calls nor reasoning"
    gemma = parser_for(template("trl/gemma4"))
    assert gemma.family.name == "plain"
    assert gemma.reason == "the template writes tool calls in a form that no parser reads"
    half = parser_for(template("trl/lfm2_2_5"))
    assert half.family.name == "hermes" and "tool calls in a form" in str(half.reason)


@pytest.mark.parametrize("style", [*STYLES, "open"])
def test_templates_of_no_family(style: str) -> None:
    parser = parser_for(ChatTemplate(STYLES.get(style, OPEN_ENDED), SPECIAL))
    assert parser.family.name == ("hermes" if style == "reasoning" else "plain")
    assert parser.parse("a <tool_call>").message["content"] == "a <tool_call>"


def test_a_broken_template_has_a_parser_too() -> None:
    parser = parser_for(ChatTemplate("{{ raise_exception('no') }}", {}))
    assert (parser.family.name, parser.reads) == ("plain", frozenset())
    assert parser.parse("a</s>").message == {"role": "assistant", "content": "a"}


def test_the_prompt_decides_where_reasoning_begins() -> None:
    original = template("trl/deepseek_r1_distill")
    parser = parser_for(original)
    assert (parser.family.name, parser.frame.opened) == ("deepseek", True)
    text = "Hm.\n</think>\n\nSalt water.<｜end▁of▁sentence｜>"
    assert parser.parse(text).message == expected(MESSAGES["text"] | {"reasoning_content": "Hm."}, False)
    assert parser.parse("<think>\n" + text) == parser.parse(text)
    qwen = template("trl/qwen3_5_think")
    assert parser_for(qwen).frame.opened is True
    closed = parser_for(qwen, {"enable_thinking": False})
    assert closed.frame.opened is False
    assert closed.parse("Salt water.<|im_end|>").message == expected(MESSAGES["text"], False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Salt <|im_end|> water.<|im_end|>", "Salt <|im_end|> water."),
        ("Salt water.", "Salt water."),
        ("Salt water.<|endoftext|>", "Salt water."),
        ("Salt water.<", "Salt water.<"),
        ("", ""),
        ("<|im_end|>", ""),
    ],
)
def test_only_the_end_of_turn_is_taken_off(text: str, message: str) -> None:
    assert parser_for(template("chatml")).parse(text).message["content"] == message


def test_values_without_quotes_have_the_type_of_the_schema() -> None:
    parser = parser_for(template("trl/qwen3_8"))

    def value(key: str, text: str, tools: Any = TOOLS) -> Any:
        block = f"<tool_call>\n<function=note>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        parsed = parser.parse(f"</think>{block}", tools)
        if parsed.problems:
            assert block in parsed.message["content"]
            return parsed.problems
        return parsed.message["tool_calls"][0]["function"]["arguments"][key]

    assert value("word", "5") == "5"
    assert value("word", "5", None) == 5
    assert value("word", '"5"', None) == '"5"'
    assert value("times", "5") == 5
    assert value("exact", "True") is True
    assert value("exact", "True", None) == "True"
    assert value("ratio", "None") is None
    assert value("tags", '["a"]') == ["a"]
    assert value("word", "a\nb") == "a\nb"
    assert value("times", "five") == ("`times` of `note` is no integer: 'five'",)
    assert value("tags", "{}") == ("`tags` of `note` is no array: '{}'",)
    assert value("exact", "1") == ("`exact` of `note` is no boolean: '1'",)
