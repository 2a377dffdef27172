"""Templates of the library against what models publish, byte by byte."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from helpers.library_talks import (
    BARE,
    NOW,
    SPECIAL,
    TALK,
    TOOL,
    USES_TOOL,
    WITH_TOOLS,
    answer,
    call,
    calls,
    render,
    result,
    system,
    user,
)

from posttrain.artifacts.fingerprint import Refusal
from posttrain_plugins.templates.render import ChatTemplate


def wheel(name: str, messages: list[dict[str, Any]], prompt: bool = False, **options: Any) -> str:
    """Render with a template that TRL ships: those of the original models."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    tools = options.pop("tools", None)
    return ChatTemplate(source, SPECIAL).render(messages, prompt, tools, NOW, options)


SYSTEM_TALK = [system("Be brief."), *TALK]

EQUAL: dict[str, tuple[str, list[tuple[list[dict[str, Any]], dict[str, Any]]]]] = {
    "llama3": ("llama-3", [(SYSTEM_TALK, {}), (TALK, {}), ([user(" a "), answer("\nb ")], {})]),
    "llama3_1": ("llama-3.1", [(SYSTEM_TALK, {}), (USES_TOOL, {"tools": [TOOL, BARE]}), (TALK, {})]),
    "llama3_2": (
        "llama-3.1",
        [
            (SYSTEM_TALK, {}),
            ([system("x"), *USES_TOOL], {"tools": [TOOL]}),
            ([system("x"), *USES_TOOL], {"tools": [TOOL], "tools_in_user_message": False}),
            (TALK, {"date_string": "1 Jan 2030"}),
        ],
    ),
    "gemma": ("gemma", [(TALK, {}), ([user(" a "), answer("\nb ")], {})]),
    "gemma3": ("gemma", [(TALK, {}), (SYSTEM_TALK, {})]),
    "phi3_5": ("phi-3", [(TALK, {}), (SYSTEM_TALK, {})]),
    "qwen2_5": (
        "qwen-2.5",
        [
            (TALK, {}),
            ([*SYSTEM_TALK, system("late"), user("x")], {}),
            (USES_TOOL, {"tools": [TOOL, BARE]}),
            (
                [
                    user("a"),
                    calls(call(), call(2, word="é", n=[1, {"x": None}]), content="Wait."),
                    result("b"),
                    result("c", 2),
                ],
                {"tools": [TOOL]},
            ),
        ],
    ),
    "qwen3": (
        "qwen-3",
        [
            (TALK, {}),
            (SYSTEM_TALK, {"enable_thinking": False}),
            ([user("a"), answer("b", "c\nd\n"), user("e"), answer("\nf", "g")], {}),
            ([user("a"), answer("<think>\nsum\n</think>\n\nb")], {}),
            ([system("x"), *USES_TOOL], {"tools": [TOOL, BARE]}),
            (
                [
                    user("a"),
                    calls(call(), call(2), content="Wait.", reasoning="hm"),
                    result("b"),
                    result("c", 2),
                    answer("d", "e"),
                ],
                {"tools": [TOOL]},
            ),
            ([user("<tool_response>\nx\n</tool_response>"), answer("b", "c")], {}),
        ],
    ),
    "gptoss": (
        "harmony",
        [
            (TALK, {"reasoning_effort": "high", "model_identity": "You are a test."}),
            (SYSTEM_TALK, {"reasoning_effort": "low"}),
            ([{"role": "developer", "content": "Be brief."}, *TALK], {}),
            ([user("a"), answer("b", "c"), user("d"), answer("e", "f")], {}),
            (USES_TOOL, {"tools": [TOOL, BARE]}),
            ([user("a"), calls(call(), reasoning="hm")], {"tools": [TOOL]}),
            ([user("a"), calls(call(), reasoning="hm"), result("b"), answer("c", "d")], {"tools": [TOOL]}),
        ],
    ),
    "deepseek_r1_distill": ("deepseek-r1", [([*SYSTEM_TALK, user("x")], {})]),
}


@pytest.mark.parametrize("original", EQUAL)
@pytest.mark.parametrize("prompt", [False, True])
def test_bytes_are_those_of_the_models_own_template(original: str, prompt: bool) -> None:
    name, conversations = EQUAL[original]
    for messages, options in conversations:
        shown = messages[:-1] if prompt and messages[-1]["role"] == "assistant" else messages
        expected = wheel(original, shown, prompt, **options)
        if original == "phi3_5" and not prompt:
            expected = expected.removesuffix("</s>")
        assert render(name, shown, prompt, **options) == expected


@pytest.mark.parametrize(
    ("name", "messages", "options", "text"),
    [
        (
            "alpaca",
            SYSTEM_TALK[:4],
            {},
            "<s>Be brief.\n\n### Instruction:\nOne\n\n### Response:\n1</s>\n\n### Instruction:\nTwo",
        ),
        (
            "alpaca",
            TALK[:1],
            {"prompt": True},
            "<s>Below is an instruction that describes a task. Write a response that appropriately completes the"
            " request.\n\n### Instruction:\nOne\n\n### Response:\n",
        ),
        ("vicuna", SYSTEM_TALK, {}, "<s>Be brief. USER: One ASSISTANT: 1</s>USER: Two ASSISTANT: 2</s>"),
        (
            "vicuna",
            TALK[:1],
            {"prompt": True},
            "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: One ASSISTANT:",
        ),
        (
            "llama-2",
            SYSTEM_TALK,
            {},
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne [/INST] 1 </s><s>[INST] Two [/INST] 2 </s>",
        ),
        (
            "zephyr",
            SYSTEM_TALK[:3],
            {"prompt": True},
            "<|system|>\nBe brief.</s>\n<|user|>\nOne</s>\n<|assistant|>\n1</s>\n<|assistant|>\n",
        ),
        (
            "phi-4",
            SYSTEM_TALK[:2],
            {"prompt": True},
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>One<|im_end|>"
            "<|im_start|>assistant<|im_sep|>",
        ),
        ("mistral-v1", SYSTEM_TALK[:4], {}, "<s> [INST] Be brief.\n\nOne [/INST] 1</s> [INST] Two [/INST]"),
        ("mistral-v3", SYSTEM_TALK[:4], {}, "<s>[INST] One[/INST] 1</s>[INST] Be brief.\n\nTwo[/INST]"),
        ("mistral-tekken", SYSTEM_TALK[:4], {}, "<s>[INST]One[/INST]1</s>[INST]Be brief.\n\nTwo[/INST]"),
        (
            "mistral-v3",
            [system("Be brief."), *USES_TOOL, user("Thanks")],
            {"tools": [BARE]},
            '<s>[INST] Define sea.[/INST][TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "sea"}, '
            '"id": "a1b2c3d41"}]</s>[TOOL_RESULTS] {"content": "salt water", "call_id": "a1b2c3d41"}[/TOOL_RESULTS]'
            ' Salt water.</s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "now", "description": '
            '"The time.", "parameters": {}}}][/AVAILABLE_TOOLS][INST] Be brief.\n\nThanks[/INST]',
        ),
        (
            "mistral-tekken",
            [*USES_TOOL, user("Thanks")],
            {"tools": [BARE], "stable_prefix": True},
            '<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "now", "description": "The time.", '
            '"parameters": {}}}][/AVAILABLE_TOOLS][INST]Define sea.[/INST][TOOL_CALLS][{"name": "look_up", '
            '"arguments": {"word": "sea"}, "id": "a1b2c3d41"}]</s>[TOOL_RESULTS]{"content": "salt water", '
            '"call_id": "a1b2c3d41"}[/TOOL_RESULTS]Salt water.</s>[INST]Thanks[/INST]',
        ),
        (
            "deepseek-r1",
            [user("a"), calls(call(), call(2), content="Wait.", reasoning="hm"), result("b"), result("c", 2)],
            {"prompt": True},
            "<s><｜User｜>a<｜Assistant｜><think>\nhm\n</think>\n\nWait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
            'function<｜tool▁sep｜>look_up\n```json\n{"word": "sea"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>'
            'function<｜tool▁sep｜>look_up\n```json\n{"word": "sea"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>b<｜tool▁output▁end｜>\n"
            "<｜tool▁output▁begin｜>c<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        ),
    ],
)
def test_bytes_are_those_of_the_published_format(
    name: str, messages: list[dict[str, Any]], options: dict[str, Any], text: str
) -> None:
    assert render(name, messages, **options) == text


@pytest.mark.parametrize("name", sorted(WITH_TOOLS))
def test_arguments_may_be_json_text(name: str) -> None:
    spelled = call()
    spelled["function"] = {"name": "look_up", "arguments": '{"word": "sea"}'}
    assert render(name, [user("a"), calls(spelled)]) == render(name, [user("a"), calls(call())])


@pytest.mark.parametrize("name", ["llama-3.1", "harmony"])
def test_what_a_call_cannot_have_beside_it(name: str) -> None:
    with pytest.raises(Refusal, match="one tool call a turn"):
        render(name, [user("a"), calls(call(), call(2))])
    if name == "llama-3.1":
        with pytest.raises(Refusal, match="no text beside a tool call"):
            render(name, [user("a"), calls(call(), content="Wait.")])


def test_mistral_needs_ids_of_nine_characters() -> None:
    for id in (None, "call_123456789"):
        with pytest.raises(Refusal, match="an id of nine letters and digits"):
            render("mistral-v3", [user("a"), calls({**call(), "id": id})])


def test_harmony_tags_in_content_are_an_error() -> None:
    for message in (
        answer("<|channel|>analysis<|message|>hm<|end|>b"),
        answer("b", "<|channel|>analysis"),
        calls(call(), content="<|channel|>final"),
    ):
        with pytest.raises(Refusal, match="harmony writes the channels itself"):
            render("harmony", [user("a"), message])
    with pytest.raises(Refusal, match="low, medium and high, not `extreme`"):
        render("harmony", [user("a")], reasoning_effort="extreme")
    with pytest.raises(Refusal, match="after the call alone"):
        render("harmony", [user("a"), result("b")])


def test_harmony_puts_text_beside_a_call_into_commentary_and_dates_itself() -> None:
    text = render("harmony", [user("a"), calls(call(), content="Wait.", reasoning="hm")])
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>{"word": "sea"}<|call|>'
    )
    assert "Current date: 2024-07-26\n" in text
    assert "Current date: 2001-02-03\n" in render("harmony", [user("a")], current_date="2001-02-03")
    messages = [user("a"), answer("b", "c"), user("d"), answer("e", "f")]
    assert ">c<|end|>" not in render("harmony", messages)
    assert ">c<|end|>" in render("harmony", messages, preserve_thinking=True)


def test_harmony_types_of_tools() -> None:
    properties = {
        "place": {
            "type": "object",
            "description": "Where.",
            "properties": {"city": {"type": "string"}, "exact": {"type": "boolean"}},
            "required": ["city"],
        },
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"type": ["integer", "null"], "default": 3},
        "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "many": {"type": "array", "items": {"type": ["string", "integer"]}},
        "any": {"type": "array"},
        "what": {},
        "free": {"type": "object", "nullable": True},
    }
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": properties, "required": ["place"]},
    }
    text = render("harmony", [user("a")], tools=[{"type": "function", "function": function}])
    assert text.split("namespace functions {\n\n")[1].split("\n\n} //")[0] == (
        "type f = (_: {\n// Where.\nplace: {\ncity: string,\nexact?: boolean,\n},\n"
        'unit?: "C" | "F", // default: C\ndays?: number | null, // default: 3\neither?: string | number,\n'
        "many?: (string | number)[],\nany?: any[],\nwhat?: any,\nfree?: object | null,\n}) => any;"
    )
