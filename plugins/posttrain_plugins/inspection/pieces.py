"""Token sequences laid over the text that they stand for.

Which tokens there are and which of them are learned is what training was given; the text only says where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from posttrain.contracts.trainer import TokenSequence
from posttrain_plugins.inspection.views import Piece

Span = tuple[int, int]
"""Characters from the first up to the second."""
_COMPARED = 1_000_000
"""Pairs of tokens that are compared to the last."""


def pieces_of(
    encoder: Any,
    text: str,
    spans: Sequence[Span],
    whole: TokenSequence,
    kept: TokenSequence,
    controls: Sequence[Any] = (),
) -> tuple[Piece, ...]:
    """Return a sequence as tokens with their characters.

    Args:
        encoder: The model's tokenizer.
        text: What the passage reads as.
        spans: The characters of the answers.
        whole: The sequence before truncation.
        kept: The same after it.
        controls: The characters that spell control tokens and are plain text.
    """
    stretches = located(encoder, text, list(whole.tokens), controls)
    cut = cut_off(whole, kept)
    plain = encoder.files.plain
    pieces: list[Piece] = []
    cursor = 0
    for position, (id, stretch) in enumerate(zip(whole.tokens, stretches, strict=True)):
        start, end = max(stretch[0], cursor), max(stretch[1], cursor)
        if start > cursor:
            pieces.append(Piece(text[cursor:start], None, ""))
        learned = bool(whole.supervised[position]) and position > 0
        pieces.append(
            Piece(
                text=text[start:end],
                id=int(id),
                name=str(plain.id_to_token(int(id))),
                supervised=learned,
                straddling=not learned and any(stretch[0] < span[0] < stretch[1] for span in spans),
                special=id in encoder.files.added,
                cut=position in cut,
                unknown=int(id) == encoder.unk_id,
            )
        )
        cursor = end
    if cursor < len(text):
        pieces.append(Piece(text[cursor:], None, ""))
    return tuple(pieces)


def cut_off(whole: TokenSequence, kept: TokenSequence) -> range:
    """Return the positions that truncation took: one stretch."""
    gone = len(whole.tokens) - len(kept.tokens)
    pairs = enumerate(zip(whole.tokens, kept.tokens, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), len(kept.tokens))
    return range(start, start + gone)


def located(encoder: Any, text: str, tokens: Sequence[int], controls: Sequence[Any] = ()) -> list[Span]:
    """Return which characters each token covers; none, where the text stands, for one that the text does not show.

    The text is tokenized again. What agrees has its place from there; the rest, such as a first token or what an
    image became, is placed in between by what each token decodes to.
    """
    ids, offsets = _tokenized(encoder, text, controls)
    places: list[Span] = []
    at = 0
    for mine, theirs, size in _matches(ids, list(tokens)):
        known = offsets[mine : mine + size]
        until = known[0][0] if known else len(text)
        places.extend(_between(encoder, text, at, until, tokens[len(places) : theirs]))
        places.extend(known)
        at = max((end for _, end in known), default=at)
    return places


def _tokenized(encoder: Any, text: str, controls: Sequence[Any]) -> tuple[list[int], list[Span]]:
    """Return the tokens of a text and the characters of each, as training has them."""
    if controls:
        ids, offsets = encoder.reader.controls.encode(text, controls)
        return ids, offsets
    encoding = encoder.files.plain.encode(text, add_special_tokens=False)
    return list(encoding.ids), list(encoding.offsets)


def _matches(again: list[int], tokens: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield what two token lists have in common, in order, and an empty match at their ends.

    Between what both begin and end with, tokens that are everywhere tie nothing together where there are many: to
    compare each with each takes hours for a long text of one letter.
    """
    offset = next((i for i in range(min(len(tokens), 3)) if tokens[i : i + len(again)] == again), None)
    if again and offset is not None:
        yield 0, offset, len(again)
        yield len(again), len(tokens), 0
        return
    shortest = min(len(again), len(tokens))
    head = next((i for i in range(shortest) if again[i] != tokens[i]), shortest)
    rest = shortest - head
    tail = next((i for i in range(rest) if again[-1 - i] != tokens[-1 - i]), rest)
    yield 0, 0, head
    mine, theirs = again[head : len(again) - tail], tokens[head : len(tokens) - tail]
    few = len(mine) * len(theirs) <= _COMPARED
    for first, second, size in SequenceMatcher(None, mine, theirs, autojunk=not few).get_matching_blocks():
        yield head + first, head + second, size
    yield len(again) - tail, len(tokens) - tail, tail
    yield len(again), len(tokens), 0


def _between(encoder: Any, text: str, at: int, until: int, tokens: Sequence[int]) -> Iterator[Span]:
    """Place tokens in the characters `at` to `until`, each where its own text is found next."""
    for id in tokens:
        spelled = encoder.decode([id], skip_special=False)
        end = at + len(spelled)
        if spelled and end <= until and text.startswith(spelled, at):
            yield at, end
            at = end
        else:
            yield at, at
