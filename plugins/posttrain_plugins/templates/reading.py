"""What a passage reads as: its text, which characters the assistant has to produce, and what was lost on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.errors import DataError


class Span(NamedTuple):
    """Characters `start` up to `end` of a text."""

    start: int
    end: int


def apart(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, those that touch as one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return tuple(found)


def require_characters(text: str) -> None:
    """Refuse a text with half a surrogate pair, which no tokenizer takes.

    Raises:
        DataError: It holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "the text holds half a surrogate pair, which is no character",
            found=ascii(text[max(error.start - 20, 0) : error.start + 20]),
            fix="decode the source anew, or leave the row out",
        ) from error


@dataclass(frozen=True)
class Note:
    """Something that a chat template did with a conversation, worth telling and not worth refusing.

    Args:
        code: What kind of thing, such as `dropped-field`.
        message: What happened, in words.
        turn: Index of the message, or None when it concerns all of them.
    """

    code: str
    message: str
    turn: int | None = None


@dataclass(frozen=True)
class Turn:
    """One stretch of text that the assistant has to produce.

    Args:
        message: Index of its message.
        span: From what follows the generation prompt to the end of turn.
        own: Where the message's own characters are in it.
        end_of_turn: The token that closes it; None when the assistant's next turn goes on where it ends.
        notes: What was lost of the message.
    """

    message: int
    span: Span
    own: tuple[Span, ...] = ()
    end_of_turn: str | None = None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A passage as text.

    Args:
        text: What is tokenized.
        spans: The characters that are supervised, in order and apart.
        turns: The supervised turns, in order.
        controls: Characters of messages that spell control tokens; they are encoded as plain text.
        notes: What was lost or could not be had.
        steps: Where each step of the answer ends, in characters; empty where nobody asked for steps.
    """

    text: str
    spans: tuple[Span, ...] = ()
    turns: tuple[Turn, ...] = ()
    controls: tuple[Span, ...] = ()
    notes: tuple[Note, ...] = ()
    steps: tuple[int, ...] = ()
