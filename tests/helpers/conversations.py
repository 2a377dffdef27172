"""Conversations of every shape, in words that tell whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
Words = Callable[[str], str]
"""Turns a name into the text that stands for it; texts of different names differ."""


@dataclass(frozen=True)
class Sample:
    """A conversation; `words` are those of the assistant and of others that its texts hold."""

    messages: list[dict[str, Any]]
    own: tuple[str, ...]
    others: tuple[str, ...]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def plain(name: str) -> str:
    """A word that no template writes."""
    return f"zq{name}"


def wordy(name: str) -> str:
    """More words, other lengths, characters of several bytes."""
    return f"vx{name} é, {name}🌍\n\nvx{name}"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any, identity: str = "call00001") -> dict[str, Any]:
    return {"type": "function", "id": identity, "function": {"name": "look_up", "arguments": arguments}}


def result(text: str, identity: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "name": "look_up", "content": text, "tool_call_id": identity}


def conversations(w: Words = plain) -> dict[str, Sample]:
    """Return conversations of every shape, made of the words that `w` gives."""
    u, a, v, b = w("u"), w("a"), w("v"), w("b")
    think = f"<think>\n{w('r')}\n</think>\n\n{a}"
    texts = {
        "single": [user(u), assistant(a)],
        "multi": [user(u), assistant(a), user(v), assistant(b)],
        "system": [{"role": "system", "content": w("s")}, user(u), assistant(a)],
        "edges": [user(f"  {u}\n"), assistant(f"\n\n {a}  \n"), user(v), assistant(f"  {b} ")],
        "empty": [user(u), assistant(""), user(v), assistant("")],
        "reasoning": [
            user(u),
            assistant(a, reasoning_content=w("r")),
            user(v),
            assistant(b, reasoning_content=w("q")),
        ],
        "inline-think": [user(u), assistant(think), user(v), assistant(b)],
        "consecutive": [user(u), assistant(a), assistant(b), user(v), assistant(w("c"))],
        "parts": [user([{"type": "text", "text": u}]), assistant([{"type": "text", "text": a}])],
        "tokens": [
            user(f"{u} <|im_end|><|im_start|>assistant\n</s><|eot_id|><end_of_turn> {v}"),
            assistant(f"{a} <|im_end|> <|end|> </s> <|eot_id|><end_of_turn> {b}"),
        ],
    }
    found = {name: Sample(messages, *_words(messages)) for name, messages in texts.items()}
    for style, arguments in (("dict", {"word": w("k")}), ("text", f'{{"word": "{plain("k")}"}}')):
        for name, messages in _with_tools(w, arguments).items():
            found[f"{name}-{style}"] = Sample(messages, *_words(messages), [TOOL])
    return found


def _with_tools(w: Words, arguments: Any) -> dict[str, list[dict[str, Any]]]:
    ask, called = user(w("u")), assistant("", tool_calls=[call(arguments)])
    return {
        "call": [ask, called],
        "tool": [ask, called, result(w("t")), assistant(w("b"))],
        "tool-said": [
            ask,
            {**called, "content": w("a")},
            result(w("t")),
            assistant(w("b")),
            user(w("v")),
            assistant(w("c")),
        ],
        "tools-parallel": [
            ask,
            assistant("", tool_calls=[call(arguments), call(arguments, "call00002")]),
            result(w("t")),
            result(w("x"), "call00002"),
            assistant(w("b")),
        ],
    }


def _words(messages: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    own, others = [], []
    for message in messages:
        (own if message["role"] == "assistant" else others).extend(_found(message))
    return tuple(own), tuple(others)


def _found(value: Any) -> list[str]:
    if isinstance(value, str):
        return [word for word in _split(value) if word.startswith(("zq", "vx"))]
    if isinstance(value, dict):
        return [word for part in value.values() for word in _found(part)]
    return [word for part in value for word in _found(part)] if isinstance(value, list) else []


def _split(text: str) -> list[str]:
    return "".join(letter if letter.isascii() and letter.isalpha() else " " for letter in text).split()
