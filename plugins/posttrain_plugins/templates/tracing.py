"""Rendering a chat template so that every character of the text tells where it comes from.

The template runs in the same sandbox as for a plain render, over traced strings, and with marks around its loops, so
that the text of each message is known. What `strftime_now` and the special tokens give is the template's own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain_plugins.templates.provenance import TOOLS, Mark, Piece, Source, Traced
from posttrain_plugins.templates.reading import Span
from posttrain_plugins.templates.render import REASONING, ChatTemplate, Message, refusing

if TYPE_CHECKING:
    from jinja2 import Template

_UNTRACED = ("role", "type")
"""Keys whose values say what something is; they are no text of the conversation."""


@dataclass(frozen=True)
class Run:
    """Characters `start` up to `end` of a text that are one piece."""

    start: int
    end: int
    piece: Piece

    @property
    def message(self) -> int | None:
        """The message that the characters come from; None for the template's own."""
        return None if self.piece.source is None else self.piece.source.message


@dataclass(frozen=True)
class Trace:
    """A rendered conversation.

    Args:
        text: What the template wrote.
        runs: Its characters in order, by where they come from.
        blocks: Where each message stands; messages without a place of their own are missing.
        tail: Where the text of the last message ends.
        marked: What stands inside `{% generation %}`.
    """

    text: str
    runs: tuple[Run, ...]
    blocks: Mapping[int, Span]
    tail: int
    marked: tuple[Span, ...]

    def own(self, message: int, within: Span) -> list[Run]:
        """Return the runs of a message inside a span."""
        return [run for run in self.runs if run.message == message and within.start <= run.start < within.end]


class Tracer:
    """Renders one template with provenance."""

    def __init__(self, template: ChatTemplate) -> None:
        self._plain = template

    def trace(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: dt.datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Trace:
        """Render a conversation as `ChatTemplate.render` does.

        Raises:
            Refusal: The template declines the conversation, or cannot be compiled or rendered.
        """
        variables = self._plain.variables(messages, add_generation_prompt, tools, now, arguments)
        variables["messages"] = [
            traced(message, number) for number, message in enumerate(variables["messages"])
        ]
        variables["tools"] = _wrapped(variables["tools"], TOOLS, ())
        with refusing():
            text = Traced.lift(self._template.render(variables))
        identities = {id(message): number for number, message in enumerate(variables["messages"])}
        return _trace(text, identities)

    @cached_property
    def _template(self) -> Template:
        from posttrain_plugins.templates.instruments import tracing_environment

        with refusing():
            return tracing_environment().from_string(self._plain.source)


def traced(message: Message, number: int) -> dict[str, Any]:
    """Return a message whose strings are traced; reasoning is one string under all of its names."""
    kept: dict[str, Any] = {}
    for key, value in message.items():
        path = (REASONING[0] if key in REASONING and value == message.get(REASONING[0]) else key,)
        kept[key] = value if key in _UNTRACED else _wrapped(value, number, path)
    return kept


def _wrapped(value: Any, message: int, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, str):
        return Traced.from_source(value, Source(message, path))
    if isinstance(value, Mapping):
        return {
            _key(key, message, (*path, key)): part
            if key in _UNTRACED
            else _wrapped(part, message, (*path, key))
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_wrapped(part, message, (*path, number)) for number, part in enumerate(value)]
    return value


def _key(key: Any, message: int, path: tuple[str | int, ...]) -> Any:
    return Traced.from_source(key, Source(message, path, key=True)) if isinstance(key, str) else key


def _trace(text: Traced, identities: Mapping[int, int]) -> Trace:
    runs: list[Run] = []
    marks: list[tuple[int, Mark]] = []
    at = 0
    for piece in text.pieces:
        if piece.mark is not None:
            marks.append((at, piece.mark))
        elif runs and piece.source is None and runs[-1].piece.source is None:
            start = runs[-1].start
            runs[-1] = Run(start, at + piece.length, Piece(at + piece.length - start))
        else:
            runs.append(Run(at, at + piece.length, piece))
        at += piece.length
    blocks = _blocks(list(_iterations(marks, identities)), runs)
    tail = max((span.end for span in blocks.values()), default=0)
    return Trace(str.__str__(text), tuple(runs), blocks, tail, tuple(_marked(marks)))


@dataclass
class _Iteration:
    """One pass through the body of a loop; `message` is what it goes through, when that is a message."""

    start: int
    end: int
    message: int | None
    inside: bool


def _iterations(marks: Sequence[tuple[int, Mark]], identities: Mapping[int, int]) -> Iterator[_Iteration]:
    """Yield what loops wrote; `inside` tells iterations that stand in another message's."""
    stack: list[_Iteration | None] = []
    for at, mark in marks:
        if mark.kind == "before":
            stack.append(None)
            continue
        if mark.kind not in ("enter", "after") or not stack:
            continue
        open_ = stack.pop()
        if open_ is not None:
            open_.end = at
            yield open_
        if mark.kind == "enter":
            inside = any(outer is not None and outer.message is not None for outer in stack)
            stack.append(_Iteration(at, at, identities.get(id(mark.value)), inside))


def _blocks(iterations: Sequence[_Iteration], runs: Sequence[Run]) -> dict[int, Span]:
    """Return where each message stands: what its outermost iteration wrote.

    A loop over indices does not say which message it is at; the first message whose characters it writes says so.
    """
    blocks: dict[int, Span] = {}
    written = [one for one in iterations if one.end > one.start and not one.inside]
    for one in sorted(written, key=lambda one: (one.message is None, one.start - one.end)):
        message = one.message if one.message is not None else _first_message(one, runs)
        if message is None:
            continue
        if one.message is None and any(_overlap(one, span) for span in blocks.values()):
            continue
        blocks.setdefault(message, Span(one.start, one.end))
    return blocks


def _first_message(one: _Iteration, runs: Sequence[Run]) -> int | None:
    found = (run.message for run in runs if one.start <= run.start < one.end and run.message is not None)
    return next((message for message in found if message != TOOLS), None)


def _overlap(one: _Iteration, span: Span) -> bool:
    return one.start < span.end and span.start < one.end


def _marked(marks: Sequence[tuple[int, Mark]]) -> Iterator[Span]:
    begun: list[int] = []
    for at, mark in marks:
        if mark.kind == "begin":
            begun.append(at)
        elif mark.kind == "finish" and begun:
            yield Span(begun.pop(), at)
