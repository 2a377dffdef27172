"""Answers as models write them."""

from __future__ import annotations

import datetime as dt
import importlib.util
from pathlib import Path
from typing import Any

from posttrain_plugins.templates.library import TEMPLATES
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.responses import FAMILIES, ResponseParser
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


def parser(family: str, opened: bool = False) -> ResponseParser:
    found = next(each for each in FAMILIES if each.name == family)
    return ResponseParser(found, Frame(opened=opened), frozenset())
