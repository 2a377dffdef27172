"""Families whose tool calls are bare JSON: Llama 3 and Mistral."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from posttrain_plugins.templates.responses.calls import Malformed, from_json, loads, loads_first, tool_call
from posttrain_plugins.templates.responses.parsed import ENDS, Draft, Tools, shortened, take_reasoning


class Llama:
    """An answer that is a JSON object with `name` and `parameters`, or follows `<|python_tag|>`: Llama 3.1 to 3.3.

    Several objects may follow each other, with a semicolon between them. After the tag there may be a call of a
    built-in tool too, such as `brave_search.call(query="…")`.
    """

    name = "llama"
    ends = ENDS
    opening = ""
    marks = ('{"name": "', '"parameters": ')
    _TAG = "<|python_tag|>"
    _CALL = re.compile(r'\s*\{\s*"name"')

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`."""
        before, tag, rest = text.partition(self._TAG)
        if tag:
            draft.content.append(before)
            self._calls(rest.strip(), tag, draft)
        elif self._CALL.match(text) and not _is_answer(text):
            self._calls(text.strip(), "", draft)
        else:
            draft.content.append(text)

    def _calls(self, text: str, tag: str, draft: Draft) -> None:
        rest, calls = text, []
        try:
            while rest:
                call, rest = _json_call(rest) if rest.startswith("{") else (_builtin(rest), "")
                calls.append(call)
                rest = rest.lstrip().removeprefix(";").lstrip()
        except Malformed as error:
            draft.report(str(error), tag + text)
            return
        if not calls:
            draft.report(f"nothing follows `{tag}`", tag)
        draft.calls += calls


class Mistral:
    """`[TOOL_CALLS]` and a JSON list, or from version 11 on one `[TOOL_CALLS]name[ARGS]{…}` a call.

    Reasoning stands between `[THINK]` tags before them.
    """

    name = "mistral"
    ends = ENDS
    opening = "[THINK]"
    marks = ("[TOOL_CALLS]",)
    _TAG = "[TOOL_CALLS]"

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`."""
        text = take_reasoning(text, opened, draft, self.opening, "[/THINK]")
        content, *parts = text.split(self._TAG)
        draft.content.append(content)
        for part in parts:
            try:
                draft.calls += self._named(part) if "[ARGS]" in part else self._listed(part)
            except Malformed as error:
                draft.report(str(error), self._TAG + part)

    def _named(self, part: str) -> list[dict[str, Any]]:
        head, _, arguments = part.partition("[ARGS]")
        name, _, id = head.partition("[CALL_ID]")
        return [tool_call(name, loads(arguments), id.strip() or None)]

    def _listed(self, part: str) -> list[dict[str, Any]]:
        value = loads(part)
        if not isinstance(value, list) or not value:
            raise Malformed(f"`{self._TAG}` is followed by no list of calls: {shortened(part)}")
        return [from_json(call) for call in value]


def _is_answer(text: str) -> bool:
    """Whether a text is a JSON object that happens to have a name, and no call."""
    try:
        value, _ = loads_first(text.strip())
    except Malformed:
        return False
    return not {"parameters", "arguments"} & value.keys()


def _json_call(text: str) -> tuple[dict[str, Any], str]:
    value, rest = loads_first(text)
    key = "arguments" if "arguments" in value and "parameters" not in value else "parameters"
    return from_json(value, key), rest


def _builtin(text: str) -> dict[str, Any]:
    """Read a call in Python's syntax, without running it."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(f"this is no tool call: {shortened(text)}") from error
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.attr == "call"
        and not call.args
    ):
        raise Malformed(f"this is no tool call: {shortened(text)}")
    name, names = call.func.value.id, [item.arg for item in call.keywords]
    if None in names or len({*names}) < len(names):
        raise Malformed(f"`{name}` has an argument twice, or one without a name: {shortened(text)}")
    try:
        arguments = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(f"an argument of `{name}` is no literal that JSON has: {shortened(text)}") from error
    return tool_call(name, arguments)
