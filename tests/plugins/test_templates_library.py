from __future__ import annotations

import datetime as dt
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from posttrain.artifacts.fingerprint import Refusal
from posttrain.errors import SpecError
from posttrain_plugins.templates import library
from posttrain_plugins.templates.library import TEMPLATES, TemplateName, named_template
from posttrain_plugins.templates.render import ChatTemplate

NOW = dt.datetime(2024, 7, 26)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "What to look up."},
                "times": {"type": "integer"},
                "in": {"type": "array", "items": {"type": "string"}},
                "how": {"type": "string", "enum": ["fast", "slow"]},
            },
            "required": ["word"],
        },
    },
}
BARE = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def call(number: int = 1, **arguments: Any) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments or {"word": "sea"}}
    return {"id": f"a1b2c3d4{number}", "type": "function", "function": function}


def calls(*made: dict[str, Any], content: str = "", reasoning: str | None = None) -> dict[str, Any]:
    return {**answer(content, reasoning), "tool_calls": list(made)}


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"a1b2c3d4{number}", "content": text}


TALK = [user("One"), answer("1"), user("Two"), answer("2")]
USES_TOOL = [user("Define sea."), calls(call()), result("salt water"), answer("Salt water.")]
WITH_TOOLS = {"llama-3.1", "mistral-v3", "mistral-tekken", "qwen-2.5", "qwen-3", "deepseek-r1", "harmony"}
WITHOUT_PREFIX = {"qwen-3", "deepseek-r1", "harmony", "mistral-v3", "mistral-tekken"}


def render(name: str, messages: list[dict[str, Any]], prompt: bool = False, **options: Any) -> str:
    tools = options.pop("tools", None)
    template = ChatTemplate(named_template(name).source, SPECIAL)
    return template.render(messages, prompt, tools, NOW, options)


def wheel(name: str, messages: list[dict[str, Any]], prompt: bool = False, **options: Any) -> str:
    """Render with a template that TRL ships: those of the original models."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    tools = options.pop("tools", None)
    return ChatTemplate(source, SPECIAL).render(messages, prompt, tools, NOW, options)


def test_names_files_and_options_are_the_same() -> None:
    assert set(get_args(TemplateName)) == set(TEMPLATES) and len(TEMPLATES) == 17
    files = {path.stem for path in Path(library.__file__).parent.glob("*.jinja")}
    assert set(TEMPLATES) == files | {"mistral-tekken"}
    assert all(template.name == name and template.summary for name, template in TEMPLATES.items())
    assert all(set(template.ends) <= set(template.tokens) for template in TEMPLATES.values())


def test_a_name_that_is_none() -> None:
    with pytest.raises(SpecError, match="there is no chat template `qwen3`") as caught:
        named_template("qwen3")
    assert caught.value.fix == "did you mean `qwen-3`?"
    with pytest.raises(SpecError) as caught:
        named_template("1234567")
    assert "`.jinja`" in str(caught.value.fix) and "zephyr" in str(caught.value.expected)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_begin_as_the_prompt_ends_and_end_with_an_end_of_turn(name: str) -> None:
    for messages in (TALK[:2], TALK, [system("Be brief."), *TALK]):
        whole, prompt = render(name, messages), render(name, messages[:-1], True)
        assert whole.startswith(prompt)
        rest = whole.removeprefix(prompt)
        end = (named_template(name).ends or ("</s>",))[0]
        assert rest.rstrip().endswith(messages[-1]["content"] + (" " if name == "llama-2" else "") + end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_are_those_that_are_listed(name: str) -> None:
    texts = [render(name, [system("Be brief."), *TALK])]
    texts += [render(name, USES_TOOL, tools=[TOOL])] if name in WITH_TOOLS else []
    written = set(
        re.findall(r"<[|｜][^<>\s]+[|｜]>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>", "".join(texts))
    )
    listed = set(named_template(name).tokens)
    as_text = {"zephyr": {"<|system|>", "<|user|>", "<|assistant|>"}, "llama-2": {"[INST]", "[/INST]"}}
    as_text["mistral-v1"] = as_text["llama-2"]
    written -= as_text.get(name, set())
    written = {token for token in written if not token.startswith("<｜tool▁")}
    assert written == listed


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_cannot_show_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refusal, match=rf"{re.escape(name)} has no role `critic`"):
        render(name, [user("a"), {"role": "critic", "content": "b"}])
    with pytest.raises(Refusal, match=f"{re.escape(name)} needs text"):
        render(name, [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}])
    with pytest.raises(Refusal, match=f"{re.escape(name)} needs text"):
        render(name, [user("a"), {"role": "assistant"}])
    if name not in WITH_TOOLS:
        with pytest.raises(Refusal, match=f"{re.escape(name)} cannot show tool calls"):
            render(name, [user("a"), calls(call())])


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"chatml", "llama-3", "zephyr", "phi-3", "phi-4"}))
def test_a_late_system_message_is_refused_or_shown(name: str) -> None:
    late = [user("a"), answer("b"), system("Be brief."), user("c")]
    if name.startswith("qwen") or name == "llama-3.1":
        assert "system" in render(name, late).partition("Be brief.")[0][-40:]
        return
    with pytest.raises(Refusal, match="has no role `system` after the first message"):
        render(name, late)


@pytest.mark.parametrize("name", ["llama-2", "gemma", "mistral-v1", "mistral-v3", "mistral-tekken"])
def test_turns_must_be_taken(name: str) -> None:
    for messages in ([user("a"), user("b")], [answer("a")], [*TALK, answer("c")]):
        with pytest.raises(Refusal, match="take turns"):
            render(name, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_longer_conversations_begin_with_the_shorter_ones_where_the_format_lets_them(name: str) -> None:
    messages = [system("Be brief."), user("One"), answer("1", "uno"), user("Two"), answer("2", "due")]

    def keeps(**options: Any) -> bool:
        whole = render(name, messages, **options)
        return all(whole.startswith(render(name, messages[:cut], **options)) for cut in range(2, 5))

    assert keeps() is (name not in WITHOUT_PREFIX)
    if name.startswith("mistral"):
        assert keeps(stable_prefix=True)
    elif name in ("qwen-3", "deepseek-r1"):
        assert keeps(preserve_thinking=True)
        assert "uno" not in render(name, messages)
        assert "<think>\nuno\n</think>\n\n1" in render(name, messages, preserve_thinking=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_the_same(name: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(named_template(name).source)
    compiled.globals["strftime_now"] = NOW.strftime
    conversations = [([system("Be brief."), *TALK], None)]
    conversations += [(USES_TOOL, [TOOL, BARE])] if name in WITH_TOOLS else []
    for messages, tools in conversations:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        expected = compiled.render(
            messages=given, tools=tools, add_generation_prompt=False, documents=None, **SPECIAL
        )
        assert render(name, messages, tools=tools) == expected


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
