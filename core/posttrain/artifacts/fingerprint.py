"""Fingerprint of a chat template: what it makes of a fixed set of probe conversations.

Rendering and tokenizing belong to the plugins; the probes, the frozen clocks and the hash are fixed here so that every
producer of a model computes the same value. A template that refuses a probe has that refusal hashed as a value.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.artifacts.kinds import TemplateFingerprint
from posttrain.artifacts.manifest import digest_of

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool, Sequence[dict[str, Any]] | None, dt.datetime], str]
"""(messages, add_generation_prompt, tools, now) → text; raises `Refusal` when the template refuses."""
Encode = Callable[[str], Sequence[int]]

CLOCKS = (dt.datetime(2001, 2, 3, 4, 5, 6), dt.datetime(2019, 12, 31, 23, 59, 58))
"""Two dates: a template whose text differs between them reads the clock."""

_REFUSED = "\x00refused"


class Refusal(Exception):
    """A template declined to render a conversation (raise_exception, an unsupported role, a missing field)."""


_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "sea"}}}

PROBES: tuple[tuple[str, Messages, Sequence[dict[str, Any]] | None], ...] = (
    ("single", [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}], None),
    (
        "multi",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "2"},
        ],
        None,
    ),
    (
        "empty-system",
        [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " padded \n"},
        ],
        None,
    ),
    (
        "reasoning",
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
            {"role": "user", "content": "3+3?"},
            {"role": "assistant", "content": "6", "reasoning_content": "Three and three."},
        ],
        None,
    ),
    (
        "inline-think",
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
        ],
        None,
    ),
    (
        "tool",
        [
            {"role": "user", "content": "Define sea."},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "look_up", "content": "salt water"},
            {"role": "assistant", "content": "Salt water."},
        ],
        [_TOOL],
    ),
    (
        "list-content",
        [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Good day."}]},
        ],
        None,
    ),
)


def fingerprint(render: Render, encode: Encode, tokenizer: str) -> TemplateFingerprint:
    """Fingerprint a chat template.

    Args:
        render: Renders a conversation at a given time; raises `Refusal` when the template declines.
        encode: Text to token ids, without adding special tokens.
        tokenizer: Hash of the tokenizer, mixed into the `tokens` hash.
    """
    texts: list[tuple[str, bool, str]] = []
    tokens: list[tuple[str, bool, Sequence[int] | str]] = []
    refusals, dated = 0, False
    for name, messages, tools in PROBES:
        for prompt_only in (False, True):
            shown = messages[:-1] if prompt_only else messages
            text = _attempt(render, shown, prompt_only, tools, CLOCKS[0])
            dated = dated or text != _attempt(render, shown, prompt_only, tools, CLOCKS[1])
            refusals += text == _REFUSED
            texts.append((name, prompt_only, text))
            tokens.append((name, prompt_only, text if text == _REFUSED else list(encode(text))))
    return TemplateFingerprint(
        tokens=digest_of([tokenizer, tokens]), text=digest_of(texts), refusals=refusals, dated=dated
    )


def _attempt(
    render: Render,
    messages: Messages,
    prompt_only: bool,
    tools: Sequence[dict[str, Any]] | None,
    now: dt.datetime,
) -> str:
    try:
        return render(messages, prompt_only, tools, now)
    except Refusal:
        return _REFUSED
