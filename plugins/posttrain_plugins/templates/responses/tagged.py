"""Families that put reasoning between `<think>` tags and tool calls between tags of their own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from posttrain_plugins.templates.responses.calls import (
    Malformed,
    blocks,
    from_json,
    loads,
    tool_call,
    typed,
)
from posttrain_plugins.templates.responses.parsed import ENDS, Draft, Tools, take_reasoning

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class Tagged(ABC):
    """`<think>reasoning</think>`, text, and one `<tool_call>` block a call."""

    ends: tuple[str, ...] = ENDS
    opening = "<think>"
    gap = 1

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`."""
        for block in blocks(take_reasoning(text, opened, draft), _OPENING, _CLOSING, draft, self.gap):
            try:
                draft.calls.append(self.call(block, tools))
            except Malformed as error:
                draft.report(str(error), _OPENING + block + _CLOSING)

    @abstractmethod
    def call(self, block: str, tools: Tools) -> dict[str, Any]:
        """Read what is inside a block.

        Raises:
            Malformed: It is no call.
        """


class Hermes(Tagged):
    """A call is a JSON object with `name` and `arguments`: Hermes, Qwen 2.5, Qwen 3."""

    name = "hermes"
    marks = ('{"name": ', "<tool_call>")

    def call(self, block: str, tools: Tools) -> dict[str, Any]:
        """See `Tagged.call`."""
        return from_json(loads(block))


class QwenCoder(Tagged):
    """A call is a `<function=name>` with a `<parameter=key>` a value: Qwen 3 Coder, Qwen 3.5, Nemotron 3."""

    name = "qwen-coder"
    marks = ("<function=", "<parameter=")
    gap = 2
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def call(self, block: str, tools: Tools) -> dict[str, Any]:
        """See `Tagged.call`."""
        function = self._FUNCTION.fullmatch(block)
        if function is None:
            raise Malformed("a tool call holds no `<function=name>` that is closed")
        return tool_call(function[1], _pairs(self._PARAMETER, function[1], function[2], tools))


class Glm(Tagged):
    """A call is the name, then an `<arg_key>` and an `<arg_value>` a value: GLM 4.5 and later."""

    name = "glm"
    marks = ("<arg_key>", "<arg_value>")
    ends = (*ENDS, "<|user|>", "<|observation|>")
    _NAME = re.compile(r"\s*([^\s<]+)\s*(.*)", re.DOTALL)
    _PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`; what follows the reasoning begins on a line of its own."""
        super().read(text.removeprefix("\n"), opened, draft, tools)

    def call(self, block: str, tools: Tools) -> dict[str, Any]:
        """See `Tagged.call`."""
        found = self._NAME.fullmatch(block)
        if found is None:
            raise Malformed("a tool call has no name")
        return tool_call(found[1], _pairs(self._PAIR, found[1], found[2], tools))


def _pairs(pattern: re.Pattern[str], name: str, text: str, tools: Tools) -> dict[str, Any]:
    """Read keys and values that fill a text.

    Raises:
        Malformed: There is more in it, a key comes twice, or a value is not of its type.
    """
    arguments: dict[str, Any] = {}
    place = 0
    while place < len(text.rstrip()):
        found = pattern.match(text, place)
        if found is None:
            raise Malformed(f"the arguments of `{name}` are cut off or hold stray text")
        key = found[1]
        if key in arguments:
            raise Malformed(f"`{name}` has the argument `{key}` twice")
        arguments[key] = typed(found[2], name, key, tools)
        place = found.end()
    return arguments
