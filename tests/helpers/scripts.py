"""Conversations of every kind, whose characters tell by themselves who said them.

The assistant writes Greek, the user Cyrillic, the system Armenian, tools Georgian: whatever a template makes of a
conversation, the script of a character says where it comes from, without any tracing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASSISTANT, USER, SYSTEM, TOOL = (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F), (0x10D0, 0x10FF)
OTHERS = (USER, SYSTEM, TOOL)
Message = dict[str, Any]

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def user(content: str = "привет как дела") -> Message:
    return {"role": "user", "content": content}


def assistant(content: str = "καλημέρα σου", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def system(content: str = "բարեւ ձեզ") -> Message:
    return {"role": "system", "content": content}


def called(*words: str) -> list[Message]:
    return [
        {
            "type": "function",
            "id": f"call{number:05d}",
            "function": {"name": "look_up", "arguments": {"word": word}},
        }
        for number, word in enumerate(words)
    ]


def answered(content: str = "გამარჯობა", number: int = 0) -> Message:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"call{number:05d}", "content": content}


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends with the assistant."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


_CALL = [user(), assistant("", tool_calls=called("λόγος")), answered(), assistant("εντάξει")]
_CALLS = [
    user(),
    assistant("μισό", tool_calls=called("άλφα", "βήτα")),
    answered("ერთი"),
    answered("ორი", 1),
    assistant("εντάξει"),
    user("еще"),
    assistant("τέλος"),
]
_THOUGHTS = [
    user(),
    assistant("σωστά", reasoning_content="σκέφτομαι"),
    user("и что"),
    assistant("όλα", reasoning_content="πάλι"),
]

CONVERSATIONS: Mapping[str, Conversation] = {
    "single": Conversation([user(), assistant()]),
    "multi": Conversation(
        [user(), assistant(), user("что нового"), assistant("τίποτα"), user("да"), assistant("ναι")]
    ),
    "system": Conversation([system(), user(), assistant()]),
    "tools": Conversation([user(), assistant()], [LOOK_UP]),
    "tool-call": Conversation(_CALL, [LOOK_UP]),
    "tool-calls": Conversation(_CALLS, [LOOK_UP]),
    "tool-calls-alone": Conversation(
        [*_CALLS[:1], assistant("", tool_calls=called("άλφα", "βήτα")), *_CALLS[2:]], [LOOK_UP]
    ),
    "thinking": Conversation([user(), assistant("σωστά", reasoning_content="σκέφτομαι πολύ")]),
    "thinking-before": Conversation(_THOUGHTS),
    "empty-answer": Conversation([user(), assistant(""), user("и"), assistant("ναι")]),
    "white-space": Conversation(
        [user("  да \n"), assistant("  ναι\n\nκαι όχι \n"), user("\n"), assistant("\tτέλος ")]
    ),
    "emoji": Conversation([user("да 👩‍👩‍👧 é"), assistant("🌍 ναι 👍🏽"), user("🇬🇷"), assistant("όχι 🎉")]),
    "right-to-left": Conversation(
        [user("שלום да"), assistant("ναι مرحبا"), user("да שלום"), assistant("مرحبا όχι")]
    ),
}
"""By what is special about them."""


def wrote(script: tuple[int, int], text: str) -> list[int]:
    """Return where in a text somebody's characters stand."""
    return [at for at, character in enumerate(text) if script[0] <= ord(character) <= script[1]]


def letters(script: tuple[int, int], value: Any) -> list[str]:
    """Return somebody's characters in a value, in order, wherever in it they stand."""
    if isinstance(value, str):
        return [value[at] for at in wrote(script, value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [character for part in parts for character in letters(script, part)]
