"""What becomes of an example that is too long: each way shortens all its sequences, or says why its row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError

Cut = Callable[[Example, int, int | None], Example | str]
"""(example, longest length, beginning-of-sequence token) → the shortened example, or why its row is dropped."""


def _keep_start(example: Example, limit: int, bos: int | None) -> Example | str:
    """Take the end away, as far as every sequence keeps something to learn."""
    if any(_holds_image(sequence, limit, len(sequence.tokens)) for sequence in example.sequences):
        return _image(limit)
    sequences = tuple(_without(sequence, limit, len(sequence.tokens)) for sequence in example.sequences)
    if any(not sequence.predicted for sequence in sequences):
        return f"truncation to {limit} tokens removes every supervised token"
    return replace(example, sequences=sequences)


def _keep_end(example: Example, limit: int, bos: int | None) -> Example | str:
    """Cut the same number of tokens from the left of every sequence, so that a pair keeps one prompt.

    What the model expects first, its beginning-of-sequence token, stays. Answers are not cut, but where a sequence
    has no prompt at all.
    """
    first = int(all(sequence.tokens[0] == bos for sequence in example.sequences))
    excess = example.longest - limit
    if not _is_text(example) and excess >= min(map(prompt_length, example.sequences)):
        return f"the prompt cannot be cut far enough to fit {limit} tokens"
    if any(_holds_image(sequence, first, first + excess) for sequence in example.sequences):
        return _image(limit)
    sequences = tuple(_without(sequence, first, first + excess) for sequence in example.sequences)
    return replace(example, sequences=sequences)


def _drop(example: Example, limit: int, bos: int | None) -> str:
    return f"longer than {limit} tokens"


def _refuse(example: Example, limit: int, bos: int | None) -> Example | str:
    raise DataError(
        "the row is too long",
        where=f"row {example.row + 1}",
        found=f"{example.longest} tokens",
        expected=f"at most {limit}",
        fix="raise max_length or choose another truncation",
    )


TRUNCATIONS: Mapping[str, Cut] = {
    "keep_start": _keep_start,
    "keep_end": _keep_end,
    "drop": _drop,
    "error": _refuse,
}


def prompt_length(sequence: TokenSequence) -> int:
    """Return how many tokens stand before the first one that is learned, at least one; all where none is."""
    places = (place for place, counts in enumerate(sequence.supervised) if counts and place)
    return next(places, len(sequence.tokens))


def _is_text(example: Example) -> bool:
    """Whether it is one sequence of which everything is learned, so that there is no prompt to spare."""
    return len(example.sequences) == 1 and prompt_length(example.sequences[0]) == 1


def _without(sequence: TokenSequence, start: int, stop: int) -> TokenSequence:
    """Take the tokens from `start` up to `stop` out of a sequence; no image is among them."""
    tokens, supervised = list(sequence.tokens), list(sequence.supervised)
    del tokens[start:stop], supervised[start:stop]
    images = tuple(_moved(image, stop - start) if image.start >= stop else image for image in sequence.images)
    return replace(sequence, tokens=tokens, supervised=supervised, images=images)


def _holds_image(sequence: TokenSequence, start: int, stop: int) -> bool:
    """Whether a token of an image is among these."""
    return any(image.start < stop and image.end > start for image in sequence.images)


def _moved(image: Any, by: int) -> Any:
    return replace(image, start=image.start - by, end=image.end - by)


def _image(limit: int) -> str:
    return f"truncation to {limit} tokens would cut an image"
