"""What becomes of an example that is too long: each way shortens all its sequences, or says why its row is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError

Gap = tuple[int, int]
"""The tokens that every sequence loses: from the first place up to the second."""
Cut = Callable[[Example, int, int | None], Gap | str]
"""(example, longest length, beginning-of-sequence token) → what to take away, or why its row is dropped."""


def shortened(example: Example, limit: int, truncation: str, bos: int | None) -> Example | str:
    """Return an example with no sequence longer than a limit, or say why its row is dropped.

    What is only measured has no say: it loses what the others lose, and its end where it still is too long.

    Args:
        example: One that is too long.
        limit: Longest length in tokens.
        truncation: A key of `TRUNCATIONS`.
        bos: The beginning-of-sequence token.

    Raises:
        DataError: It is too long, and the truncation is `error`.
    """
    learned = example.learned
    gap: Gap | str = (limit, limit)
    if learned.longest > limit:
        gap = TRUNCATIONS[truncation](learned, limit, bos)
    if isinstance(gap, str):
        return gap
    if any(_holds_image(sequence, *gap) for sequence in learned.sequences):
        return f"truncation to {limit} tokens would cut an image"
    sequences = tuple(_without(sequence, *gap) for sequence in example.sequences)
    if any(not sequence.predicted and not sequence.measured for sequence in sequences):
        return f"truncation to {limit} tokens removes every supervised token"
    kept = (_without(each, limit, len(each.tokens)) if each.measured else each for each in sequences)
    return replace(example, sequences=tuple(kept))


def _keep_start(example: Example, limit: int, bos: int | None) -> Gap:
    """Take the end away."""
    return limit, example.longest


def _keep_end(example: Example, limit: int, bos: int | None) -> Gap | str:
    """Cut the same number of tokens from the left of every sequence, so that a pair keeps one prompt.

    What the model expects first, its beginning-of-sequence token, stays. Answers are not cut, but where a sequence
    has no prompt at all.
    """
    first = int(all(sequence.tokens[0] == bos for sequence in example.sequences))
    excess = example.longest - limit
    if not _is_text(example) and excess >= min(map(prompt_length, example.sequences)):
        return f"the prompt cannot be cut far enough to fit {limit} tokens"
    return first, first + excess


def _drop(example: Example, limit: int, bos: int | None) -> str:
    return f"longer than {limit} tokens"


def _refuse(example: Example, limit: int, bos: int | None) -> str:
    raise DataError(
        "the row is too long",
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
    """Return how many tokens stand before the first one that is learned, at least one; all where none is.

    Where numbers are learned at the ends of answers or steps, it is how many stand before the answer.
    """
    if sequence.prompt is not None:
        return max(sequence.prompt, 1)
    places = (place for place, counts in enumerate(sequence.supervised) if counts and place)
    return next(places, len(sequence.tokens))


def _is_text(example: Example) -> bool:
    """Whether it is one sequence of which everything is learned, so that there is no prompt to spare."""
    first, *others = example.sequences
    return not others and first.prompt is None and prompt_length(first) == 1


def _without(sequence: TokenSequence, start: int, stop: int) -> TokenSequence:
    """Take the tokens from `start` up to `stop` out of a sequence; no image is among them."""
    tokens, supervised = list(sequence.tokens), list(sequence.supervised)
    del tokens[start:stop], supervised[start:stop]
    images = tuple(_moved(image, stop - start) if image.start >= stop else image for image in sequence.images)
    prompt = sequence.prompt
    if prompt is not None and start < prompt:
        prompt -= min(stop, prompt) - start
    return replace(sequence, tokens=tokens, supervised=supervised, images=images, prompt=prompt)


def _holds_image(sequence: TokenSequence, start: int, stop: int) -> bool:
    """Whether a token of an image is among these."""
    return any(image.start < stop and image.end > start for image in sequence.images)


def _moved(image: Any, by: int) -> Any:
    return replace(image, start=image.start - by, end=image.end - by)
