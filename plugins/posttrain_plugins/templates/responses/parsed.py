"""What parsing gives, and what parsers of all families share: the frame around an answer and its reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools that could be called; families that write values bare need them to know a type."""

ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")
"""End tokens that many models share."""

_AFTER_TOKEN = re.compile(r"(?<=[>\]])")


@dataclass(frozen=True)
class ParsedResponse:
    """An answer, read.

    Args:
        message: An assistant message: `content` (perhaps empty), and where there are any `reasoning_content` and
            `tool_calls`, each `{"type": "function", "function": {"name": str, "arguments": dict}}`, some with an `id`.
        problems: What is malformed, each in a sentence; the text it is about is in the content.
    """

    message: dict[str, Any]
    problems: tuple[str, ...] = ()


class Parser(Protocol):
    """Reads the answers that a chat template's model gives."""

    def parse(self, text: str, tools: Tools = None) -> ParsedResponse:
        """Read an answer.

        Args:
            text: What was generated, special tokens included, with or without its end-of-turn token.
            tools: The tools that could be called.
        """


@dataclass(frozen=True)
class Frame:
    """What a template puts around an answer.

    Args:
        lead: Blanks between the prompt and the answer's text.
        tail: What follows the answer's text, beginning with its end of turn.
        opened: Whether the prompt opens the reasoning, so that the answer begins inside it.
    """

    lead: str = ""
    tail: str = ""
    opened: bool = False

    def inside(self, text: str, ends: Sequence[str]) -> str:
        """Return an answer without its lead and its end of turn.

        Args:
            text: The answer.
            ends: End tokens of the family.
        """
        cuts = [self.tail[: match.start()] for match in _AFTER_TOKEN.finditer(self.tail)]
        known = [self.tail, self.tail.strip(), *cuts, *ends]
        found = [end for end in known if end.strip() and text.endswith(end)]
        body = text.removesuffix(max(found, key=len)) if found else text
        return body.removeprefix(self.lead)


@dataclass
class Draft:
    """A message in the making."""

    reasoning: str = ""
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def report(self, problem: str, text: str = "") -> None:
        """Note a problem and keep the text that it is about."""
        self.problems.append(problem)
        self.content.append(text)

    def finished(self) -> ParsedResponse:
        """Return what was read."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning.strip():
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return ParsedResponse(message, tuple(self.problems))


class Family(Protocol):
    """One way to write reasoning and tool calls."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Tokens that end an answer; empty where `read` needs to see them."""

    @property
    def opening(self) -> str:
        """What opens reasoning; empty where there is none."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Strings in the source of templates of this family."""

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """Read an answer without its end of turn into a draft.

        Args:
            text: The answer.
            opened: Whether the prompt opened the reasoning.
            draft: What to add to.
            tools: The tools that could be called.
        """


def take_reasoning(
    text: str, opened: bool, draft: Draft, opening: str = "<think>", closing: str = "</think>"
) -> str:
    """Move reasoning at the beginning of a text into a draft and return the rest.

    Args:
        text: The answer.
        opened: Whether the prompt opened the reasoning.
        draft: What to add to.
        opening: What opens reasoning.
        closing: What closes it.
    """
    start = text.lstrip()
    if start.startswith(opening):
        start = start.removeprefix(opening)
    elif not opened:
        if closing in text:
            draft.problems.append(f"`{closing}` closes reasoning that nothing opened")
        return text
    reasoning, closed, rest = start.partition(closing)
    draft.reasoning = reasoning.strip("\n")
    if not closed:
        draft.problems.append(f"the reasoning never ends: there is no `{closing}`")
    return rest.lstrip("\n")


def shortened(text: str, length: int = 60) -> str:
    """Return the beginning of a text, quoted, for a problem."""
    return repr(text if len(text) <= length else text[:length] + "…")
