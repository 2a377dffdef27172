"""Prompts and completions as lists of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import DataError

Message = dict[str, Any]
Turns = str | Sequence[Mapping[str, Any]]


def as_messages(prompt: Turns) -> list[Message]:
    """Return a prompt as messages; a string is one user turn."""
    return _messages(prompt, "user")


def completion_messages(completion: Turns) -> list[Message]:
    """Return a completion as messages; a string is one assistant turn."""
    return _messages(completion, "assistant")


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that a row's conversation may call: its column `tools`, a list or a list as JSON text.

    Raises:
        DataError: The column holds something else.
    """
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except json.JSONDecodeError as error:
            raise DataError(f"the column `tools` is not valid JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("the column `tools` must be a list of objects, each a tool", found=repr(value)[:80])
    return value


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its string content, or its text parts joined."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def message_problem(message: Any) -> str | None:
    """Say what keeps a value from being a chat message, or return None."""
    if not isinstance(message, Mapping):
        return f"is {type(message).__name__}, not an object with `role` and `content`"
    if not isinstance(message.get("role"), str):
        keys = ", ".join(f"`{key}`" for key in message) or "nothing"
        return f"has no `role` (it has {keys})"
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return "has no `content`"
    if content is not None and not isinstance(content, str | list):
        return f"has a `content` of type {type(content).__name__}, not a string or a list of parts"
    return None


def _messages(value: Turns, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [dict(message) for message in value]
