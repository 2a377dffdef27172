"""What a chat template does not show of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain_plugins.templates.provenance import NOWHERE, TOOLS
from posttrain_plugins.templates.reading import Note
from posttrain_plugins.templates.render import REASONING, Message
from posttrain_plugins.templates.tracing import Trace

_FIELDS = ("content", REASONING[0], "tool_calls", "name")
_INCIDENTAL = ("id", "type", "index", "tool_call_id")
"""Keys of tool calls and content parts that templates may well leave out."""


def omissions(messages: Sequence[Message], tools: Any, trace: Trace) -> list[Note]:
    """Return a note for each field that the text does not show as it is.

    Args:
        messages: The messages as the template was given them (`render.prepared`).
        tools: The tools, if any.
        trace: The traced render.
    """
    shown: dict[tuple[int, tuple[str | int, ...]], list[tuple[int, int]]] = {}
    for run in trace.runs:
        source = run.piece.source
        if source is not None and not source.key:
            shown.setdefault((source.message, source.path), []).append((run.piece.offset, run.piece.length))
    notes = []
    if tools and not any(message == TOOLS for message, _ in shown):
        notes.append(Note("dropped-field", "the chat template does not show the tools"))
    for number, message in enumerate(messages):
        for name in _FIELDS:
            value = message.get(name)
            if isinstance(value, list) and value and str(value) in trace.text:
                # A template that was made for strings; nobody has said what it prints.
                what = f"the chat template prints the parts of `{name}` as a Python list"
                notes.append(Note("rewritten", what, number))
                continue
            leaves = list(_leaves(value, (name,)))
            found = [shown.get((number, path)) for path, _ in leaves]
            note = _field_note(name, [text for _, text in leaves], found, trace.text)
            if note is not None:
                notes.append(Note(*note, number))
    return notes


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the strings of a field that say something."""
    if isinstance(value, str):
        if value.strip():
            yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _INCIDENTAL:
                yield from _leaves(part, (*path, key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, (*path, number))


def _field_note(
    name: str, texts: Sequence[str], found: Sequence[list[tuple[int, int]] | None], rendered: str
) -> tuple[str, str] | None:
    if not texts:
        return None
    if not any(found):
        return "dropped-field", f"the chat template does not show `{name}`"
    if not all(found):
        return "dropped-field", f"the chat template shows a part of `{name}` alone"
    if name not in ("content", REASONING[0]):
        return None
    lost = [_lost(text, places or [], rendered) for text, places in zip(texts, found, strict=True)]
    if any(part.strip() for part in lost):
        return "rewritten", f"the chat template does not show `{name}` as it is"
    if any(lost):
        return "trimmed", f"the chat template trims `{name}`"
    return None


def _lost(text: str, places: Sequence[tuple[int, int]], rendered: str) -> str:
    """Return the characters of a text that are not shown; other spellings, such as JSON's, show all of them."""
    if any(offset == NOWHERE for offset, _ in places):
        return ""
    seen = bytearray(len(text))
    for offset, length in places:
        seen[offset : offset + length] = b"\x01" * length
    lost = "".join(character for character, there in zip(text, seen, strict=True) if not there)
    return lost if not lost.strip() or text.strip() not in rendered else ""
