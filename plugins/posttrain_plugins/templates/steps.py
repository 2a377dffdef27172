"""Where the steps of an answer end: in characters of a text, and in its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages, completion_messages
from posttrain_plugins.templates.encoded import Encoded
from posttrain_plugins.templates.reading import Note, Reading, Span
from posttrain_plugins.templates.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from tokenizers import Encoding

APART = Note(
    "steps-apart",
    "a token would begin in one step and end in the next, so the steps are tokenized one by one",
)

Offsets = Sequence[tuple[int, int]]
Apart = Callable[[Reading], Encoded]


def continued(prompt: Reading, passage: Passage) -> Reading:
    """Return how an answer in steps, a string, goes on behind what its prompt reads as."""
    before, answer = len(prompt.text), str(passage.completion)
    whole = Span(before, before + len(answer))
    return replace(
        prompt, text=prompt.text + answer, spans=(whole,), steps=tuple(before + end for end in passage.steps)
    )


def turn_ends(passage: Passage, reading: Reading) -> tuple[int, ...]:
    """Return where the last assistant turn of each step ends in a conversation's text.

    Raises:
        DataError: The template shows no such turn of a step, or it has weight 0.
    """
    assert passage.completion is not None, "steps are those of a completion"
    first = 0 if passage.prompt is None else len(as_messages(passage.prompt))
    messages = completion_messages(passage.completion)
    shown: dict[int, int] = {}
    for turn in reading.turns:
        shown[turn.message] = max(turn.span.end, shown.get(turn.message, 0))
    ends, begun = [], 0
    for number, end in enumerate(passage.steps, 1):
        turns = [at for at in range(begun, end) if messages[at].get("role") == "assistant"]
        if not turns or first + turns[-1] not in shown:
            raise DataError(
                f"step {number} has no assistant turn that is shown and learned, so nothing tells where it ends",
                fix="take the step out, or use a chat template that shows it",
            )
        ends.append(shown[first + turns[-1]])
        begun = end
    return tuple(ends)


def places(offsets: Offsets, begin: int, ends: Sequence[int]) -> list[int] | None:
    """Return the last token of each step; None where a token begins in one step and ends in the next.

    Args:
        offsets: The characters that each token stands for, in order; several may stand for parts of one.
        begin: Where the first step begins.
        ends: Where each step ends.

    Raises:
        DataError: The tokenizer leaves nothing of a step.
    """
    starts = [start for start, _ in offsets]
    found: list[int] = []
    for number, end in enumerate(ends, 1):
        place = bisect_left(starts, end) - 1
        if place < 0 or offsets[place][1] <= begin:
            raise _nothing_left(number)
        if offsets[place][1] > end:
            return None
        found.append(place)
        begin = end
    return found


def marked_steps(encoded: Encoded, offsets: Offsets, reading: Reading, apart: Apart) -> Encoded:
    """Return the tokens of a conversation with the last one of each of its steps.

    Args:
        encoded: The tokens of the whole text.
        offsets: The characters that each stands for.
        reading: The text.
        apart: Tokenizes it step by step, where the whole text would join steps.

    Raises:
        DataError: The tokenizer leaves nothing of a step.
    """
    if not reading.steps:
        return encoded
    found = places(offsets, reading.spans[0].start, reading.steps)
    if found is None:
        return _placed(apart(reading))
    return _placed(replace(encoded, steps=tuple(found)))


def tokenized_steps(files: TokenizerFiles, encoding: Encoding, reading: Reading, apart: Apart) -> Encoded:
    """Return the tokens of strings in steps: of the whole text, or step by step where that text would join steps.

    Nothing closes the answer: what the model is asked about ends with the last step.

    Raises:
        DataError: The tokenizer leaves nothing of a step.
    """
    begin = reading.spans[0].start
    found = places(encoding.offsets, begin, reading.steps)
    if found is None:
        made = apart(reading)
    else:
        inside = [end > begin for _, end in encoding.offsets]
        made = Encoded(encoding.ids, inside, steps=tuple(found))
    tokens = files.prefixed(made.tokens)
    shift = len(tokens) - len(made.tokens)
    steps = tuple(place + shift for place in made.steps)
    supervised = [False] * shift + made.supervised
    return _placed(replace(made, tokens=tokens, supervised=supervised, steps=steps).without_first())


def one_by_one(files: TokenizerFiles, ids: Sequence[int], offsets: Offsets, reading: Reading) -> Encoded:
    """Return the tokens of a text whose steps are tokenized each for itself.

    Args:
        files: The tokenizer files.
        ids: The tokens up to the end of the first step.
        offsets: The characters that each stands for.
        reading: The text, which ends with its last step.

    Raises:
        DataError: The tokenizer leaves nothing of a step.
    """
    begin = reading.spans[0].start
    behind = [reading.text[start:end] for start, end in pairwise(reading.steps)]
    (first,) = places(offsets, begin, reading.steps[:1]) or (len(ids) - 1,)
    tokens, supervised, steps = list(ids), [end > begin for _, end in offsets], [first]
    for number, piece in enumerate(files.continuation.encode_batch(behind, add_special_tokens=False), 2):
        if not piece.ids:
            raise _nothing_left(number)
        tokens += piece.ids
        supervised += [True] * len(piece.ids)
        steps.append(len(tokens) - 1)
    return Encoded(tokens, supervised, notes=(APART,), steps=tuple(steps))


def moved(encoded: Encoded) -> Encoded:
    """Return a sequence whose steps are behind the tokens of its images, each of which was one token."""
    steps = list(encoded.steps)
    for image in encoded.images:
        steps = [place + (image.end - image.start - 1) * (place > image.start) for place in steps]
    return replace(encoded, steps=tuple(steps))


def _nothing_left(number: int) -> DataError:
    return DataError(
        f"the tokenizer leaves nothing of step {number}", fix="take steps of white space out of the rows"
    )


def _placed(encoded: Encoded) -> Encoded:
    """Refuse a step that ends with the very first token.

    Raises:
        DataError: One does: there is no prompt.
    """
    if encoded.steps[0] == 0:
        raise DataError("the tokenizer leaves nothing of the prompt before the first step")
    return encoded
