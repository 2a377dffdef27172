"""A passage: what a row gives and what is to be learned, before there are tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""A turn: `role`, `content` (a string or a list of parts), and what templates know of besides."""
Turns = str | Sequence[Message]


@dataclass(frozen=True)
class Passage:
    """One prompt with one answer, which become one token sequence.

    Args:
        role: What it is to its row: `completion`, `chosen`, `rejected`.
        prompt: A string or messages; None when the completion stands alone.
        completion: A string or messages, of which every assistant turn is learned; None when only the prompt is known.
        tools: JSON schemas of the tools that the conversation may call.
        arguments: What the chat template is given besides (`chat_template_kwargs`), such as `enable_thinking`.
        images: The images that stand for the image parts of the messages, in their order.
        steps: Where each step of the completion ends, the last one with it: in characters of a string, in messages of
            a list. Empty where nobody asks for steps. A string in steps goes on where messages of a prompt open an
            answer, and nothing closes it.
        measured: Nothing of it is learned: only what a loss measures over the step depends on it. It stands behind
            the others, and what becomes of its row does not depend on it.
    """

    role: str
    prompt: Turns | None
    completion: Turns | None
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()
    steps: Sequence[int] = ()
    measured: bool = False

    @property
    def conversational(self) -> bool:
        """Whether it holds messages, which need a chat template."""
        return any(part is not None and not isinstance(part, str) for part in (self.prompt, self.completion))
