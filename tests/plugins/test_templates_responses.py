from __future__ import annotations

import datetime as dt
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import OPEN_ENDED, STYLES

from posttrain_plugins.templates.library import TEMPLATES
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.responses import FAMILIES, ResponseParser, parser_for
from posttrain_plugins.templates.responses.parsed import Frame

NOW = dt.datetime(2024, 7, 26)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "times": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "ratio": {"type": ["number", "null"]},
                },
            },
        },
    }
    for name in ("look_up", "note")
]


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"a1b2c3d4{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


NESTED = {"where": {"path": ["a", {"b": [1, 2.5, None, True]}], "x": "<y>"}, "tags": ["é", "“q”", "\\n"]}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"content": "Salt water."},
    "unicode": {"content": "Größe 🌊 שלום\n\nNext: {\"a\": 1} <b>x</b> 'y'"},
    "reasoning": {"content": "Salt water.", "reasoning_content": "First.\n\nThen: <b>é</b>."},
    "call": {"content": "", "tool_calls": [call("look_up", word="sea", times=2)]},
    "nested": {"content": "", "tool_calls": [call("note", **NESTED)]},
    "unicode call": {"content": "", "tool_calls": [call("note", word='Größe "🌊"\n{}\\ 5', exact=False)]},
    "no arguments": {"content": "", "tool_calls": [call("note")]},
    "parallel": {"content": "", "tool_calls": [call("look_up", word="5"), call("note", 2, ratio=0.5)]},
    "text before": {"content": "Let me see.", "tool_calls": [call("look_up", word="sea")]},
    "all": {
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [call("look_up", word="sea"), call("note", 2, **NESTED)],
    },
    "reasoning, call": {
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call("look_up", word="sea")],
    },
}
CALLS = {"call", "nested", "unicode call", "no arguments"}
EVERY = set(MESSAGES)
READS: dict[str, tuple[str, set[str]]] = {
    "alpaca": ("plain", {"text", "unicode"}),
    "chatml": ("plain", {"text", "unicode"}),
    "gemma": ("plain", {"text", "unicode"}),
    "llama-2": ("plain", {"text", "unicode"}),
    "llama-3": ("plain", {"text", "unicode"}),
    "mistral-v1": ("plain", {"text", "unicode"}),
    "phi-3": ("plain", {"text", "unicode"}),
    "phi-4": ("plain", {"text", "unicode"}),
    "vicuna": ("plain", {"text", "unicode"}),
    "zephyr": ("plain", {"text", "unicode"}),
    "qwen-2.5": ("hermes", EVERY - {"reasoning", "all", "reasoning, call"}),
    "qwen-3": ("hermes", EVERY),
    "deepseek-r1": ("deepseek", EVERY),
    "llama-3.1": ("llama", {"text", "unicode"} | CALLS),
    "mistral-v3": ("mistral", {"text", "unicode", "parallel"} | CALLS),
    "mistral-tekken": ("mistral", {"text", "unicode", "parallel"} | CALLS),
    "harmony": ("harmony", EVERY - {"parallel", "all"}),
    "trl/qwen2_5": ("hermes", EVERY - {"reasoning", "all", "reasoning, call"}),
    "trl/qwen3": ("hermes", EVERY),
    "trl/qwen3_instruct_2507": ("hermes", EVERY - {"reasoning", "all", "reasoning, call"}),
    "trl/qwen3_5_think": ("qwen-coder", EVERY),
    "trl/qwen3_8": ("qwen-coder", EVERY),
    "trl/nemotron_3_nano": ("qwen-coder", {"reasoning", "reasoning, call", "all"}),
    "trl/glm4moe": ("glm", EVERY),
    "trl/gptoss": ("harmony", EVERY - {"parallel", "all", "text before"}),
    "trl/llama3_1": ("llama", {"text", "unicode"} | CALLS),
    "trl/llama3_2": ("llama", {"text", "unicode"} | CALLS),
    "trl/phi3_5": ("plain", {"text", "unicode"}),
    "trl/smolvlm": ("plain", {"text", "unicode"}),
}


def template(name: str) -> ChatTemplate:
    if not name.startswith("trl/"):
        return ChatTemplate(TEMPLATES[name].source, SPECIAL)
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / "chat_templates" / f"{name.removeprefix('trl/')}.jinja"
    return ChatTemplate(path.read_text(), SPECIAL)


def completion(chat: ChatTemplate, message: dict[str, Any], parts: bool = False) -> str:
    """What a model would have to write after the prompt."""
    question: dict[str, Any] = {"role": "user", "content": "Define sea."}
    message = {"role": "assistant", **message}
    if parts:
        question, message = (
            {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in (question, message)
        )
    tools = TOOLS if "tool_calls" in message else None
    prompt = chat.render([question], True, tools, NOW)
    whole = chat.render([question, message], False, tools, NOW)
    assert whole.startswith(prompt)
    return whole.removeprefix(prompt)


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


def parser(family: str, opened: bool = False) -> ResponseParser:
    found = next(each for each in FAMILIES if each.name == family)
    return ResponseParser(found, Frame(opened=opened), frozenset())


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
