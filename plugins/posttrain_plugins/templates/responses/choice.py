"""Which family a chat template belongs to, found by what it makes of answers that are known."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.fingerprint import Refusal
from posttrain_plugins.templates.atoms import outside_tags
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.responses.deepseek import DeepSeek
from posttrain_plugins.templates.responses.harmony import Harmony
from posttrain_plugins.templates.responses.json_calls import Llama, Mistral
from posttrain_plugins.templates.responses.parsed import Draft, Family, Frame, ParsedResponse, Tools
from posttrain_plugins.templates.responses.plain import Plain
from posttrain_plugins.templates.responses.tagged import Glm, Hermes, QwenCoder

FAMILIES: tuple[Family, ...] = (
    Plain(),
    Hermes(),
    QwenCoder(),
    Glm(),
    DeepSeek(),
    Llama(),
    Mistral(),
    Harmony(),
)
"""Every family; where two read a template's answers equally well, the first is taken."""

_NOW = dt.datetime(2024, 7, 26)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
_QUESTION = {"role": "user", "content": "Define sea."}


def _called(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}


_CALLS = (_called("a1b2c3d4e", word="sea", times=2), _called("a1b2c3d4f", word="sky", times=3))
_ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "content": {"content": "Salt water."},
    "reasoning": {"content": "Salt water.", "reasoning_content": "Waves come to mind."},
    "call": {"content": "", "tool_calls": [_CALLS[0]]},
    "text before a call": {"content": "Salt water.", "tool_calls": [_CALLS[0]]},
    "reasoning before a call": {
        "content": "",
        "reasoning_content": "Waves come to mind.",
        "tool_calls": [_CALLS[0]],
    },
    "several calls": {"content": "", "tool_calls": list(_CALLS)},
}

_VISIBLE = {"tool calls": ("call", "look_up"), "reasoning": ("reasoning", "Waves come to mind.")}


@dataclass(frozen=True)
class ResponseParser:
    """The parser for a chat template.

    Args:
        family: How the template writes reasoning and calls.
        frame: What it puts around an answer.
        reads: Which kinds of answers came back as they were: keys such as `reasoning` and `several calls`.
        reason: What the template writes that stays in the content, or why there is nothing to read; None where
            tool calls are read, and reasoning if the template has any.
    """

    family: Family
    frame: Frame
    reads: frozenset[str]
    reason: str | None = None

    def parse(self, text: str, tools: Tools = None) -> ParsedResponse:
        """Read an answer.

        Args:
            text: What was generated, special tokens included, with or without its end-of-turn token.
            tools: The tools that could be called.
        """
        draft = Draft()
        self.family.read(self.frame.inside(text, self.family.ends), self.frame.opened, draft, tools)
        return draft.finished()


def parser_for(template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> ResponseParser:
    """Find the parser for a chat template: the family that gives back most of what the template is made to render.

    Templates that render no calls or reasoning of earlier turns, though their models write them, are told by
    strings that belong to one family.

    Args:
        template: The template.
        arguments: What it is given besides, such as `enable_thinking`, which changes how prompts end.
    """
    probes = _Probes(template, arguments or {})
    frame = probes.frame()
    found = [_gained(family, frame, probes) for family in FAMILIES]
    most = max(len(kinds) for kinds in found)
    candidates = [
        (family, kinds) for family, kinds in zip(FAMILIES, found, strict=True) if len(kinds) == most
    ]
    family, reads = next(
        (
            pair
            for pair in candidates
            if pair[0].marks and all(mark in template.source for mark in pair[0].marks)
        ),
        candidates[0],
    )
    opened = bool(family.opening) and probes.prompt.rstrip().endswith(family.opening)
    return ResponseParser(family, Frame(frame.lead, frame.tail, opened), reads, probes.unread(reads))


class _Probes:
    """Answers as a template renders them."""

    def __init__(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> None:
        self._template = template
        self._arguments = arguments
        self._rendered: dict[str, Sequence[tuple[str, str]]] = {}
        prompts = (self._attempt([spell(_QUESTION)], True, None) for spell in _SPELLINGS)
        self.prompt = next(filter(None, prompts), "")

    def frame(self) -> Frame:
        """Return what surrounds the text of a simple answer."""
        for _, text in self.completions("content"):
            before, found, after = text.partition(str(_ANSWERS["content"]["content"]))
            if found:
                return Frame(before if not before.strip() else "", after)
        return Frame()

    def completions(self, kind: str) -> Sequence[tuple[str, str]]:
        """Return how an answer is rendered, in every spelling that the template takes.

        Each comes with what the prompt and the conversation begin with alike.
        """
        if kind not in self._rendered:
            spelled = [
                (spell(_QUESTION), spell({"role": "assistant", **_ANSWERS[kind]})) for spell in _SPELLINGS
            ]
            self._rendered[kind] = [
                pair
                for question, answer in spelled
                for tools in ([_TOOL], None)
                for pair in self._completion(question, answer, tools)
            ]
        return self._rendered[kind]

    def unread(self, reads: frozenset[str]) -> str | None:
        """Say what of the template's calls and reasoning nothing reads; None where all is read."""
        lost = [
            what
            for what, (kind, mark) in _VISIBLE.items()
            if kind not in reads and any(mark in text for _, text in self.completions(kind))
        ]
        if lost:
            return f"the template writes {' and '.join(lost)} in a form that no parser reads"
        return None if len(reads) > 1 else "the template writes neither tool calls nor reasoning"

    def _completion(
        self, question: dict[str, Any], answer: dict[str, Any], tools: Tools
    ) -> Iterator[tuple[str, str]]:
        prompt = self._attempt([question], True, tools)
        whole = self._attempt([question, answer], False, tools)
        if prompt is not None and whole is not None:
            length = _alike(prompt, whole)
            yield whole[:length], whole[length:]

    def _attempt(self, messages: list[dict[str, Any]], prompt: bool, tools: Any) -> str | None:
        try:
            return self._template.render(messages, prompt, tools, _NOW, self._arguments)
        except Refusal:
            return None


def _alike(prompt: str, whole: str) -> int:
    """Return how many characters both begin with, no control token cut in two."""
    if whole.startswith(prompt):
        return len(prompt)
    pairs = enumerate(zip(prompt, whole, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), min(len(prompt), len(whole)))
    return outside_tags(whole, 0, length)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


_SPELLINGS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (dict, _arguments_as_text, _in_parts)


def _gained(family: Family, frame: Frame, probes: _Probes) -> frozenset[str]:
    return frozenset(kind for kind in _ANSWERS if _comes_back(kind, family, frame, probes))


def _comes_back(kind: str, family: Family, frame: Frame, probes: _Probes) -> bool:
    for shared, text in probes.completions(kind):
        opened = bool(family.opening) and shared.rstrip().endswith(family.opening)
        parser = ResponseParser(family, Frame(frame.lead, frame.tail, opened), frozenset())
        parsed = parser.parse(text, [_TOOL])
        if not parsed.problems and _plain(parsed.message) == _plain(_ANSWERS[kind]):
            return True
    return False


def _plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content"), calls
