"""Harmony (gpt-oss): a sequence of messages, each with a channel and perhaps a recipient."""

from __future__ import annotations

import re

from posttrain_plugins.templates.responses.calls import Malformed, loads, tool_call
from posttrain_plugins.templates.responses.parsed import Draft, Tools, shortened

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_CLOSINGS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_FUNCTIONS = "functions."


class Harmony:
    """Channel analysis is reasoning, final and commentary are content, a recipient makes a call."""

    name = "harmony"
    ends: tuple[str, ...] = ()
    opening = ""
    marks = (_CHANNEL, _MESSAGE)

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`. The prompt ends with `<|start|>assistant`, so the first header begins without it."""
        complete = text if text.startswith(_START) else f"{_START}assistant{text}"
        _, *parts = complete.split(_START)
        channel = ""
        for number, part in enumerate(parts, 1):
            channel = _read(part, number == len(parts), draft)
        if channel == "analysis":
            draft.problems.append("the answer ends with reasoning: there is no message in the channel final")


def _read(part: str, last: bool, draft: Draft) -> str:
    """Read one message and return its channel; the last may lack its closing token, which ends generation."""
    header, begun, body = part.replace(_CONSTRAIN, " ").partition(_MESSAGE)
    raw = _START + part
    if not begun:
        draft.report(f"a message has no `{_MESSAGE}`: {shortened(raw)}", raw)
        return ""
    author, _, rest = header.partition(_CHANNEL)
    channel = rest.split()[0] if rest.split() else ""
    if not author.startswith("assistant") or channel not in ("analysis", "commentary", "final"):
        draft.report(f"a message is not the assistant's, or has no known channel: {shortened(header)}", raw)
        return channel
    closing = next((closing for closing in _CLOSINGS if body.endswith(closing)), "")
    content = body.removesuffix(closing)
    if not closing and not last:
        draft.problems.append(f"a message in the channel {channel} never ends")
    recipient = _RECIPIENT.search(author) or _RECIPIENT.search(rest)
    if recipient is not None:
        _call(recipient[1], content, raw, draft)
    elif channel == "analysis":
        draft.reasoning = "\n".join(filter(None, (draft.reasoning, content)))
    else:
        draft.content.append("\n" + content if any(draft.content) else content)
    return channel


def _call(recipient: str, content: str, raw: str, draft: Draft) -> None:
    try:
        draft.calls.append(tool_call(recipient.removeprefix(_FUNCTIONS), loads(content)))
    except Malformed as error:
        draft.report(str(error), raw)
