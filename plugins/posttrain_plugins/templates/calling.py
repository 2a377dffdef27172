"""Which chat templates show calls of tools."""

from __future__ import annotations

from functools import cache
from typing import Any

from posttrain.artifacts.fingerprint import Refusal
from posttrain_plugins.templates.render import ChatTemplate

WITH_CALLS = (
    "deepseek-r1",
    "harmony",
    "llama-3.1",
    "mistral-tekken",
    "mistral-v3",
    "qwen-2.5",
    "qwen-3",
)
"""The templates of the library that show calls of tools; written down, as rendering all takes a while."""

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_NAME = "look_up"
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"word": "sea"}}}
_MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Define sea."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)


@cache
def shows_calls(source: str) -> bool:
    """Whether a template prints what an assistant's message calls, whatever special tokens it is given."""
    try:
        return _NAME in ChatTemplate(source, _SPECIAL).render(_MESSAGES)
    except Refusal:
        return False
