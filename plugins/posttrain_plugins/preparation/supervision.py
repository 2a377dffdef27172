"""What of a passage is learned: how a passage is cut into prompt and answer, and which tokens count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, Judge, StepEnds, Supervise
from posttrain_plugins.data.conversation import as_messages, completion_messages

Mask = Callable[[Any], Sequence[bool] | Sequence[int]]
"""What an encoder made of a passage → which tokens are learned."""


@dataclass(frozen=True)
class Supervision:
    """One way to say what is learned.

    Args:
        passage: Changes a passage before it is encoded.
        mask: Says which of its tokens are learned.
        own: What is learned is a number at the token itself, not the token.
        verdicts: Says which of the numbers that a row gives are those of its example, which may be shortened.
    """

    passage: Callable[[Passage], Passage]
    mask: Mask
    own: bool = False
    verdicts: Callable[[tuple[float, ...], Example], tuple[float, ...]] = lambda said, example: said


def no_answer(turns: Any) -> bool:
    """Whether a completion is turns of which none is the assistant's."""
    if turns is None or isinstance(turns, str):
        return False
    return all(turn.get("role") != "assistant" for turn in turns)


def _last_answer(passage: Passage) -> Passage:
    """Move everything before the last assistant turn into the prompt."""
    if passage.completion is None or isinstance(passage.completion, str):
        return passage
    turns = completion_messages(passage.completion)
    last = max(at for at, turn in enumerate(turns) if turn.get("role") == "assistant")
    before = [] if passage.prompt is None else as_messages(passage.prompt)
    return replace(passage, prompt=[*before, *turns[:last]] or None, completion=turns[last:])


def _answers(encoded: Any) -> Sequence[bool]:
    supervised: Sequence[bool] = encoded.supervised
    return supervised


def _everything(encoded: Any) -> Sequence[int]:
    """Every token but the first one, which nothing predicts, and those that stand for images."""
    mask = bytearray(b"\1") * len(encoded.tokens)
    mask[:1] = b"\0"
    for image in encoded.images:
        mask[image.start : image.end] = bytes(image.end - image.start)
    return bytes(mask)


def _end(encoded: Any) -> Sequence[int]:
    """The last token alone, where a model that gives numbers has seen all of an answer."""
    mask = bytearray(len(encoded.tokens))
    mask[-1:] = b"\1"
    return bytes(mask)


def _whole(passage: Passage) -> Passage:
    return passage


_NAMED: Mapping[Supervise | Judge, Supervision] = {
    Supervise.ANSWERS: Supervision(_whole, _answers),
    Supervise.LAST_ANSWER: Supervision(_last_answer, _answers),
    Supervise.EVERYTHING: Supervision(_whole, _everything),
    Judge.END: Supervision(_whole, _end, own=True),
}


def supervision(way: Supervise | Judge | StepEnds) -> Supervision:
    """Return how one way to supervise is done."""
    return _at_steps(way) if isinstance(way, StepEnds) else _NAMED[way]


def _at_steps(way: StepEnds) -> Supervision:
    kept = slice(-1, None) if way.last else slice(None)

    def mask(encoded: Any) -> Sequence[int]:
        found = bytearray(len(encoded.tokens))
        for place in encoded.steps[kept]:
            found[place] = 1
        return bytes(found)

    def verdicts(said: tuple[float, ...], example: Example) -> tuple[float, ...]:
        """Truncation may have taken the last steps away."""
        return said[kept][: example.predicted]

    return Supervision(lambda passage: separated(passage, way.separator), mask, own=True, verdicts=verdicts)


def separated(passage: Passage, separator: str) -> Passage:
    """Return a passage each of whose steps ends with a separator, where they are parts of a string."""
    text = passage.completion
    if not isinstance(text, str):
        return passage
    parts = [text[begin:end] for begin, end in pairwise((0, *passage.steps))]
    ended = [part if part.endswith(separator) else part + separator for part in parts]
    return replace(passage, completion="".join(ended), steps=tuple(accumulate(map(len, ended))))
