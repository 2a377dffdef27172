"""What of a passage is learned: how a passage is cut into prompt and answer, and which tokens count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Judge, Supervise
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
    """

    passage: Callable[[Passage], Passage]
    mask: Mask
    own: bool = False


def no_answer(passage: Passage) -> bool:
    """Whether a passage holds turns of which none is the assistant's."""
    turns = passage.completion
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


SUPERVISIONS: Mapping[Supervise | Judge, Supervision] = {
    Supervise.ANSWERS: Supervision(lambda passage: passage, _answers),
    Supervise.LAST_ANSWER: Supervision(_last_answer, _answers),
    Supervise.EVERYTHING: Supervision(lambda passage: passage, _everything),
    Judge.END: Supervision(lambda passage: passage, _end, own=True),
}
