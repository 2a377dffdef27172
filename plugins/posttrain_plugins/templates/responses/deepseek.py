"""DeepSeek V3, R1 and V3.1: reasoning that the prompt opens, calls between tokens of their own."""

from __future__ import annotations

import re
from typing import Any

from posttrain_plugins.templates.responses.calls import Malformed, blocks, loads, tool_call
from posttrain_plugins.templates.responses.parsed import ENDS, Draft, Tools, shortened, take_reasoning

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


class DeepSeek:
    """One list of calls, each a type, a name and a fenced JSON object; from V3.1 on a name and an object."""

    name = "deepseek"
    ends = (*ENDS, "<｜end▁of▁sentence｜>")
    opening = "<think>"
    marks = (_BEGIN, _CALL)

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`."""
        rest = take_reasoning(text, opened, draft)
        content, begun, listed = rest.partition(_BEGIN)
        draft.content.append(content)
        if not begun:
            return
        calls, ended, after = listed.partition(_END)
        for block in blocks(calls, _CALL, _CALL_END, draft):
            try:
                draft.calls.append(_call(block))
            except Malformed as error:
                draft.report(str(error), _CALL + block + _CALL_END)
        if not ended:
            draft.problems.append(f"the list of tool calls never ends: there is no `{_END}`")
        elif after.strip():
            draft.report(f"text follows the tool calls: {shortened(after.strip())}", after)


def _call(block: str) -> dict[str, Any]:
    first, separated, second = block.partition(_SEPARATOR)
    if not separated:
        raise Malformed(f"a tool call has no `{_SEPARATOR}`: {shortened(block)}")
    fenced = _FENCED.fullmatch(second)
    if fenced is not None:
        return tool_call(fenced[1], loads(fenced[2]))
    return tool_call(first, loads(second))
