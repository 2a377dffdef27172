"""A passage as tokens, with what is learned of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain_plugins.templates.reading import Note, Span

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class Encoded:
    """One token sequence.

    Args:
        tokens: Token ids, length T.
        supervised: T booleans; the first is always False, since nothing predicts it.
        straddling: Tokens that begin before an assistant's turn and end inside it; they are not supervised,
            because a generation that starts after the prompt cannot produce them.
        notes: What the chat template did with the conversation that is worth telling.
        images: The images whose tokens are among them (`templates.vision.Placed`).
        steps: The last token of each step of the answer, ascending; empty where nobody asked for steps.
    """

    tokens: list[int]
    supervised: list[bool]
    straddling: int = 0
    notes: tuple[Note, ...] = ()
    images: tuple[Any, ...] = ()
    steps: tuple[int, ...] = ()

    def without_first(self) -> Encoded:
        """Leave the first token out of what is supervised: there is nothing before it that could predict it."""
        if not self.supervised or not self.supervised[0]:
            return self
        return replace(self, supervised=[False, *self.supervised[1:]])


def masked(ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> Encoded:
    """Supervise the tokens that lie inside spans.

    Args:
        ids: The tokens.
        offsets: The characters that each stands for; they may overlap and leave gaps.
        spans: The supervised characters, in order and apart.
    """
    if len(spans) == 1:
        ((first, last),) = spans
        supervised = [first <= start and end <= last for start, end in offsets]
        return Encoded(list(ids), supervised, sum([start < first < end for start, end in offsets]))
    starts = [span.start for span in spans]
    supervised, straddling = [], 0
    for start, end in offsets:
        behind = bisect_right(starts, start)
        supervised.append(behind > 0 and end <= spans[behind - 1].end)
        straddling += behind < len(starts) and starts[behind] < end
    return Encoded(list(ids), supervised, straddling)


def marked(encoding: Encoding, spans: Sequence[Span]) -> Encoded:
    """Supervise the tokens that lie inside spans, as `masked` does, and look at the edges of spans alone.

    Tokens stand in the order of the text, so those inside a span are neighbours.
    """
    ids = encoding.ids
    supervised = [False] * len(ids)
    straddling = counted = 0
    for span in spans:
        edges = _edges(encoding, span, len(ids))
        if edges is None:
            return masked(ids, encoding.offsets, spans)
        begun, first, last = edges
        straddling += max(0, first - max(begun, counted))
        counted = first
        supervised[first:last] = [True] * (last - first)
    return Encoded(ids, supervised, straddling)


def _edges(encoding: Encoding, span: Span, count: int) -> tuple[int, int, int] | None:
    """Return the first token that reaches over a span's start, the first inside of it and the one behind the last.

    None when no token has the span's first or last character, as when a tokenizer drops blanks.
    """
    if span.start == span.end:
        return None
    first, last = encoding.char_to_token(span.start), encoding.char_to_token(span.end - 1)
    if first is None or last is None:
        return None
    offsets, begun = encoding.token_to_chars, first
    while first < count and (chars := offsets(first)) is not None and chars[0] < span.start:
        first += 1
    while last < count and (chars := offsets(last)) is not None and chars[1] <= span.end:
        last += 1
    return begun, first, max(first, last)
