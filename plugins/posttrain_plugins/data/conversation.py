"""Prompts and completions as lists of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.reading.parsing import DECODER, told

Message = dict[str, Any]
Turns = str | Sequence[Mapping[str, Any]]

INSTEAD_OF_CONTENT = (
    "tool_calls",
    "thinking",
    "reasoning",
    "reasoning_content",
    "refusal",
    "audio",
    "function_call",
)
"""Keys of a message that may say something where its content says nothing."""
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", type(None): "null"}


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
    value = json_of(row, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("the column `tools` must be a list of objects, each a tool", found=repr(value)[:80])
    return value


def json_of(row: Mapping[str, Any], column: str) -> Any:
    """Return what a column holds, as it is or as JSON text; nothing for an empty text.

    Raises:
        DataError: Its text is not valid JSON, or spells half a surrogate pair.
    """
    value = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        parsed = DECODER.decode(value or "null")
        if "\\u" in value:
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"the column `{column}` holds half a surrogate pair ({half})") from error
    except (ValueError, RecursionError) as error:
        why = told(error, value).removeprefix("invalid JSON: ")
        raise DataError(f"the column `{column}` is not valid JSON: {why}") from error
    return parsed


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its string content, or its text parts joined."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def empty_answer(turns: Turns | None) -> int | None:
    """Return the number of the first assistant turn that says and calls nothing, from 1; None without one."""
    answers = () if turns is None or isinstance(turns, str) else turns
    said = [message for message in answers if message["role"] == "assistant"]
    return next((number for number, each in enumerate(said, 1) if _is_empty(each)), None)


def _is_empty(message: Mapping[str, Any]) -> bool:
    return not content_text(message).strip() and not any(message.get(key) for key in INSTEAD_OF_CONTENT)


def answers_nothing(turns: Turns | None) -> bool:
    """Whether an empty answer is learned: those of weight 0 are not."""
    if turns is None or isinstance(turns, str):
        return False
    return empty_answer([message for message in turns if message.get("weight") != 0]) is not None


def message_problem(message: Any) -> str | None:
    """Say what keeps a value from being a chat message, or return None."""
    if not isinstance(message, Mapping):
        return f"is {type(message).__name__}, not an object with `role` and `content`"
    if not isinstance(message.get("role"), str):
        keys = ", ".join(f"`{str(key)[:40]}`" for key in list(message)[:12]) or "nothing"
        return f"has no `role` (it has {keys})"
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        return f"has a `weight` of {weight!r}, not 0 (not learned) or 1"
    return _content_problem(message) or _calls_problem(message.get("tool_calls"))


def _content_problem(message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if content is None:
        return None if any(message.get(key) for key in INSTEAD_OF_CONTENT) else "has no `content`"
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"has a `content` of type {type(content).__name__}, not a string or a list of parts"
    for number, part in enumerate(content, 1):
        if not isinstance(part, Mapping):
            return f"is no message: part {number} of its `content` is {_TYPES.get(type(part), type(part).__name__)}"
        if not isinstance(part.get("type", "text"), str):
            return f"is no message: part {number} of its `content` has no `type`"
    return None


def _calls_problem(calls: Any) -> str | None:
    if calls is None:
        return None
    if not isinstance(calls, list):
        return f"has `tool_calls` of type {type(calls).__name__}, not a list"
    for number, call in enumerate(calls, 1):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return f"has tool call {number} without a name"
    return None


def _messages(value: Turns, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [dict(message) for message in value]
