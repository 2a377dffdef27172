"""Tokenizing prompts, answers and conversations, and saying which tokens are supervised.

A conversation is rendered whole and tokenized once; characters decide what is supervised, offsets carry that
over to tokens. Nothing is recognised by its value, so a pad token that equals the end of turn loses nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.artifacts.fingerprint import Refusal, fingerprint
from posttrain.artifacts.kinds import TemplateFingerprint
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Message, Turns, as_messages, completion_messages, content_text
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.tokenizer import TokenizerFiles, read_json

Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools that a conversation may call."""

CLOCK = dt.datetime(2024, 7, 26, 12, 0, 0)
"""What templates that print the date are told, so that the same rows give the same tokens on any day."""

_PROBE: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
_CONTEXT = 24


@dataclass(frozen=True)
class Encoded:
    """One token sequence.

    Args:
        tokens: Token ids, length T.
        supervised: T booleans; the first is always False, since nothing predicts it.
        straddling: Tokens that begin before an assistant's turn and end inside it; they are not supervised,
            because a generation that starts after the prompt cannot produce them.
    """

    tokens: list[int]
    supervised: list[bool]
    straddling: int = 0


@dataclass(frozen=True)
class _Span:
    """Characters `start` to `end` of a text are an answer."""

    start: int
    end: int


class Encoder:
    """The tokenizer and chat template of a model directory.

    Attributes:
        files: The tokenizer files.
        template: The chat template, or None.
        bos_id: The beginning-of-sequence token, or None.
        eos_id: The end-of-sequence token, or None.
        unk_id: The unknown token, or None.
        declared_pad: The padding token, or None.
    """

    def __init__(self, directory: Path, now: dt.datetime = CLOCK) -> None:
        self._directory = directory
        self._now = now
        self.files = TokenizerFiles.read(directory)
        source = self.files.template
        self.template = None if source is None else ChatTemplate(source, self.files.special_tokens)
        self.generation = read_json(directory / "generation_config.json")
        self.config = read_json(directory / "config.json")
        self.bos_id = self.files.token_id("bos_token")
        self.eos_id = self.files.token_id("eos_token")
        self.unk_id = self.files.token_id("unk_token")
        self.declared_pad = self._declared_pad()

    @classmethod
    def open(cls, directory: Path, now: dt.datetime = CLOCK) -> Encoder:
        """Read a model directory.

        Args:
            directory: Holds `tokenizer.json` and, where there are any, its config and chat template.
            now: The date that the template is told.

        Raises:
            DataError: A file is missing or malformed.
        """
        return cls(directory, now)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.template is not None

    @property
    def vocabulary(self) -> int:
        """Size of the tokenizer, added tokens included."""
        return int(self.files.plain.get_vocab_size(with_added_tokens=True))

    @property
    def pad_id(self) -> int:
        """The id to fill batches with: the padding token, else an end token, else 0. No mask reads it."""
        candidates = (self.declared_pad, self.eos_id, *self._generation_eos)
        return next((candidate for candidate in candidates if candidate is not None), 0)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, by the template, the generation config and the tokenizer."""
        ids = set(self._generation_eos)
        if self.eos_id is not None:
            ids.add(self.eos_id)
        if self.end_of_turn is not None:
            ids.add(self.end_of_turn)
        return tuple(sorted(ids))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that closes an assistant's answer in the chat template; None without one."""
        if self.template is None:
            return None
        try:
            encoded = self.encode_messages(_PROBE)
        except DataError:
            return None
        pairs = zip(encoded.tokens, encoded.supervised, strict=True)
        return [token for token, counts in pairs if counts][-1]

    def encode_text(self, text: str) -> Encoded:
        """Tokenize plain text, all supervised, between the tokenizer's own first token and an end token."""
        return self._plain(text, 0)

    def encode_prompt(self, prompt: Turns, tools: Tools = None) -> list[int]:
        """Tokenize a prompt: a string as it is, messages with their tools and what opens an answer."""
        if isinstance(prompt, str):
            return self._with_prefix(self.files.plain.encode(prompt, add_special_tokens=False).ids)
        text = self._render(as_messages(prompt), True, tools)
        return list(self.files.plain.encode(text, add_special_tokens=False).ids)

    def encode_pair(self, prompt: Turns, completion: Turns, tools: Tools = None) -> Encoded:
        """Tokenize a prompt with its completion, which alone is supervised.

        Two strings are joined as they are and closed with an end-of-sequence token; the prompt's tokens are
        those of `encode_prompt`, since that is what a generation starts from. With messages the chat
        template decides; the completion's assistant turns are supervised up to their end-of-turn token.

        Args:
            prompt: A string or messages.
            completion: A string or messages.
            tools: JSON schemas that the chat template is given; two strings have no place for them.

        Raises:
            DataError: There is no chat template, or it declines, rewrites earlier turns or leaves turns open.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._strings(prompt, completion)
        before = as_messages(prompt)
        return self._conversation([*before, *completion_messages(completion)], len(before), tools)

    def encode_messages(self, messages: Sequence[Message], tools: Tools = None) -> Encoded:
        """Tokenize a conversation whose assistant turns are supervised, each up to its end-of-turn token.

        Raises:
            DataError: As `encode_pair`, or no turn is the assistant's.
        """
        return self._conversation(list(messages), 0, tools)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Turn ids into text."""
        return str(self.files.plain.decode(list(ids), skip_special_tokens=skip_special))

    def has_special(self, ids: Sequence[int]) -> bool:
        """Whether ids hold a special token other than one that ends a generation; `decode` would hide it."""
        return not self.files.special.difference(self.stop_ids).isdisjoint(ids)

    def fingerprint(self) -> TemplateFingerprint | None:
        """Return what the chat template makes of the probe conversations; None without a template."""
        template = self.template
        if template is None:
            return None
        plain = self.files.plain
        return fingerprint(
            lambda messages, prompt, tools, now: template.render(messages, prompt, tools, now),
            lambda text: plain.encode(text, add_special_tokens=False).ids,
            self.files.hash,
        )

    @cached_property
    def _generation_eos(self) -> tuple[int, ...]:
        value = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def _declared_pad(self) -> int | None:
        own = self.files.token_id("pad_token")
        named = self.generation.get("pad_token_id", self.config.get("pad_token_id"))
        return own if own is not None or named is None else int(named)

    def _with_prefix(self, ids: Sequence[int]) -> list[int]:
        prefix = self.files.prefix
        return list(ids) if tuple(ids[: len(prefix)]) == prefix else [*prefix, *ids]

    def _strings(self, prompt: str, completion: str) -> Encoded:
        """Tokenize both together, or apart where joining them would change the tokens of the prompt."""
        joined = self._plain(prompt + completion, len(prompt))
        before = self.encode_prompt(prompt)
        if not joined.straddling and joined.tokens[: len(before)] == before:
            return joined
        after = self.files.continuation.encode(completion, add_special_tokens=False).ids
        return self._closed([*before, *after], [False] * len(before) + [True] * len(after))

    def _plain(self, text: str, boundary: int) -> Encoded:
        """Supervise `text` from character `boundary` on, and an end token after it."""
        encoded = self._tokenized(text, [_Span(boundary, len(text))])
        tokens = self._with_prefix(encoded.tokens)
        supervised = [False] * (len(tokens) - len(encoded.tokens)) + encoded.supervised
        return self._closed(tokens, supervised, encoded.straddling)

    def _closed(self, tokens: list[int], supervised: list[bool], straddling: int = 0) -> Encoded:
        """Supervise an end token after the tokens, unless they end with it."""
        end = next((i for i in (self.eos_id, *self._generation_eos) if i is not None), None)
        if end is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model would never learn to stop",
                where=str(self._directory),
                fix="name `eos_token` in its `tokenizer_config.json`",
            )
        if not tokens or tokens[-1] != end:
            tokens, supervised = [*tokens, end], [*supervised, True]
        return _without_first(Encoded(tokens, supervised, straddling))

    def _conversation(self, messages: list[Message], first: int, tools: Tools) -> Encoded:
        """Supervise the assistant turns from message `first` on."""
        full = self._render(messages, False, tools)
        turns = [i for i, message in enumerate(messages) if i >= first and message.get("role") == "assistant"]
        if not turns:
            raise DataError("the conversation has no assistant turn to learn from", found=_roles(messages))
        encoded = self._tokenized(full, [self._span(messages, turn, full, tools) for turn in turns])
        return _without_first(encoded)

    def _span(self, messages: list[Message], turn: int, full: str, tools: Tools) -> _Span:
        """Locate an assistant turn in the rendered text: from generation prompt to end of turn."""
        opened = self._render(messages[:turn], True, tools)
        _require_prefix(opened, full, turn)
        closed = full if turn == len(messages) - 1 else self._render(messages[: turn + 1], False, tools)
        _require_prefix(closed, full, turn)
        answer = content_text(messages[turn]).strip()
        found = closed.find(answer, len(opened))
        tail = len(opened) if found < 0 else found + len(answer)
        return _Span(len(opened), self._end_of_turn(closed, tail, turn))

    def _end_of_turn(self, closed: str, tail: int, turn: int) -> int:
        """Return the character after the last added token in the template's own text behind the answer."""
        encoding = self.files.plain.encode(closed[tail:], add_special_tokens=False)
        added = self.files.added
        ends = [end for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if id in added]
        if not ends:
            raise DataError(
                f"the chat template closes message {turn + 1} with no special token, so the model would "
                "never learn to stop",
                found=repr(closed[tail:]),
                fix="use a template that ends the assistant's turn: `template: chatml` of `model.load`",
            )
        return tail + max(ends)

    def _tokenized(self, text: str, spans: Sequence[_Span]) -> Encoded:
        encoding = self.files.plain.encode(text, add_special_tokens=False)
        supervised, straddling = [], 0
        for start, end in encoding.offsets:
            supervised.append(any(span.start <= start and end <= span.end for span in spans))
            straddling += any(start < span.start < end for span in spans)
        return Encoded(list(encoding.ids), supervised, straddling)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools) -> str:
        if self.template is None:
            raise DataError(
                "the rows are conversations but the model has no chat template",
                where=str(self._directory),
                fix="give it one (`template: chatml` of `model.load`), or use rows of plain strings",
            )
        try:
            return self.template.render(messages, add_generation_prompt, tools, self._now)
        except Refusal as refusal:
            raise DataError(
                f"the chat template declines this conversation: {refusal}",
                found=_roles(messages),
                fix="change the rows to what the template takes, or use another template",
            ) from refusal


def _without_first(encoded: Encoded) -> Encoded:
    """Leave the first token out: there is nothing before it that could predict it."""
    return Encoded(encoded.tokens, [False, *encoded.supervised[1:]], encoded.straddling)


def _require_prefix(part: str, full: str, turn: int) -> None:
    if full.startswith(part):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(part, full, strict=False)) if a != b), min(len(part), len(full))
    )
    raise DataError(
        f"the chat template rewrites earlier turns: what it renders up to message {turn + 1} is "
        "not how the whole conversation begins, so the answer cannot be told from the prompt",
        where=f"character {at}",
        found=repr(full[at : at + _CONTEXT]),
        expected=repr(part[at : at + _CONTEXT]),
        fix="use a template that only ever appends, or rows with one assistant turn",
    )


def _roles(messages: Sequence[Any]) -> str:
    return "turns " + ", ".join(str(message.get("role")) for message in messages)
