"""Conversations that templates of the library render."""

from __future__ import annotations

import datetime as dt
from typing import Any

from posttrain_plugins.templates.library import named_template
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


def render(name: str, messages: list[dict[str, Any]], prompt: bool = False, **options: Any) -> str:
    tools = options.pop("tools", None)
    template = ChatTemplate(named_template(name).source, SPECIAL)
    return template.render(messages, prompt, tools, NOW, options)
