"""OpenAI's fine-tuning files: one conversation a line, as its chat interface takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.foreign import Foreign, Misshapen, demand
from posttrain_plugins.data.formats.language import Messages
from posttrain_plugins.data.formats.passages import others
from posttrain_plugins.data.formats.preference import Preference
from posttrain_plugins.data.formats.schema import speaks_openai


class OpenAIChat(Foreign):
    """`messages`, with `tools` and `parallel_tool_calls` where there are any.

    The JSON text of a call's arguments becomes an object, which is what chat templates expect; `functions` and
    `function_call` become `tools` and `tool_calls`; a `refusal` is the answer's content.
    """

    columns = ("messages",)
    optional = ("tools", "parallel_tool_calls", "functions")
    becomes = "messages"
    canonical = Messages

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Messages with something that only these files have."""
        return "messages" in schema and speaks_openai(schema)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as messages."""
        messages = row["messages"]
        demand(isinstance(messages, list), "`messages` is not a list")
        made = others(row, "functions", "function_call") | {"messages": plain_turns("messages", messages)}
        functions = row.get("functions")
        if functions:
            demand(isinstance(functions, list), "`functions` is not a list")
            demand(not row.get("tools"), "`functions` stands beside `tools`")
            made["tools"] = [{"type": "function", "function": function} for function in functions]
        yield made


class OpenAIPreference(Foreign):
    """`input` with `messages` and `tools`, and a preferred and a non-preferred output."""

    columns = ("input", "preferred_output", "non_preferred_output")
    becomes = "preference"
    canonical = Preference

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as prompt and two answers."""
        given = row["input"]
        demand(
            isinstance(given, Mapping) and isinstance(given.get("messages"), list),
            "`input` has no list `messages`",
        )
        for column in self.columns[1:]:
            demand(isinstance(row[column], list), f"`{column}` is not a list of messages")
        yield (
            others(row, *self.columns)
            | others(given, "messages")
            | {
                "prompt": plain_turns("input", given["messages"]),
                "chosen": plain_turns("preferred_output", row["preferred_output"]),
                "rejected": plain_turns("non_preferred_output", row["non_preferred_output"]),
            }
        )


def plain_turns(column: str, messages: Iterable[Any]) -> list[Any]:
    """Return messages as chat templates expect them; what is no object is left for its judge."""
    return [
        _plain(f"`{column}` message {number}", message) if isinstance(message, Mapping) else message
        for number, message in enumerate(messages, 1)
    ]


def _plain(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key not in {"refusal", "function_call"}}
    if message.get("refusal"):
        demand(not message.get("content"), f"{where} has both a `content` and a `refusal`")
        made["content"] = message["refusal"]
    calls = list(message.get("tool_calls") or ())
    if message.get("function_call"):
        calls.append({"type": "function", "function": message["function_call"]})
    if calls:
        made["tool_calls"] = [_call(where, call) for call in calls]
    return made


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Misshapen(f"{where} has a tool call without a `function`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise Misshapen(f"{where} has `arguments` that are not valid JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
