"""ShareGPT: `conversations` of objects with `from` and `value`, alone or with two answers to choose from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.foreign import Foreign, Misshapen, demand, string
from posttrain_plugins.data.formats.language import Messages
from posttrain_plugins.data.formats.passages import others
from posttrain_plugins.data.formats.preference import SIDES, Preference
from posttrain_plugins.data.formats.schema import holds
from posttrain_plugins.data.formats.values import listed

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""What the names of speakers mean."""

_CALLS = frozenset({"function_call", "tool_call"})


class ShareGpt(Foreign):
    """`conversations`, with `system` and `tools` where there are any; speakers are renamed, calls become tool calls."""

    columns = ("conversations",)
    optional = ("system", "tools")
    becomes = "messages"
    canonical = Messages

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Lists of turns, without a choice of answers."""
        return holds(schema, "conversations", "list") and not all(side in schema for side in SIDES)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as messages."""
        yield others(row, "conversations", "system") | {"messages": _history(row)}


class ShareGptPreference(Foreign):
    """`conversations` up to the prompt, with a `chosen` and a `rejected` turn."""

    columns = ("conversations", *SIDES)
    optional = ("system", "tools")
    becomes = "preference"
    canonical = Preference

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Lists of turns with a choice of answers."""
        return super().fits(schema) and holds(schema, "conversations", "list")

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as prompt and two answers."""
        sides = {side: [_turn(side, one, number) for number, one in _numbered(row[side])] for side in SIDES}
        yield others(row, "conversations", "system", *SIDES) | {"prompt": _history(row), **sides}


def _history(row: Row) -> list[dict[str, Any]]:
    turns = row["conversations"]
    demand(isinstance(turns, list) and bool(turns), "`conversations` is not a list of turns")
    system = string(row, "system", optional=True)
    found = [_turn("conversations", turn, number) for number, turn in enumerate(turns, 1)]
    if system.strip():
        demand(found[0]["role"] != "system", "`system` stands beside a conversation that begins with one")
        found.insert(0, {"role": "system", "content": system})
    return found


def _numbered(value: Any) -> Iterable[tuple[int, Any]]:
    return enumerate(value if isinstance(value, list) else [value], 1)


def _turn(column: str, turn: Any, number: int) -> dict[str, Any]:
    """Return a turn as a message; keys besides speaker and text stay as they are."""
    where = f"`{column}` turn {number}"
    demand(isinstance(turn, Mapping), f"{where} is {type(turn).__name__}, not an object")
    speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    rest = others(turn, "from", "value", "role", "content")
    if speaker is None:
        raise Misshapen(f"{where} has no `from` (it has {listed(turn)})")
    role = ROLES.get(str(speaker).lower())
    if role is None:
        raise Misshapen(f"{where} is from `{speaker}`; known speakers are {listed(ROLES)}")
    if str(speaker).lower() in _CALLS:
        return {"role": role, "content": "", "tool_calls": _calls(where, text), **rest}
    demand(isinstance(text, str), f"{where} has a `value` of type {type(text).__name__}, not a string")
    return {"role": role, "content": text, **rest}


def _calls(where: str, text: Any) -> list[dict[str, Any]]:
    """Return the calls that a turn's text holds: an object with `name` and `arguments`, or a list of them."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise Misshapen(f"{where} is a call that is not valid JSON: {error}") from error
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        demand(
            isinstance(call, Mapping) and isinstance(call.get("name"), str),
            f"{where} is a call without a `name`",
        )
    return [{"type": "function", "function": dict(call)} for call in calls]
