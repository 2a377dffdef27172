"""Tokenizing prompts, answers and conversations, and saying which tokens are supervised.

A conversation is rendered whole and tokenized once; characters decide what is supervised, offsets carry that
over to tokens. Nothing is recognised by its value, so a pad token that equals the end of turn loses nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.artifacts.fingerprint import Refusal, fingerprint
from posttrain.artifacts.kinds import TemplateFingerprint
from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Message, Turns
from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.encoded import Encoded, marked, masked
from posttrain_plugins.templates.reader import Reader
from posttrain_plugins.templates.reading import Note, Reading, require_characters
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.seams import Seams
from posttrain_plugins.templates.steps import marked_steps, moved, one_by_one, tokenized_steps
from posttrain_plugins.templates.tokenizer import TokenizerFiles, read_json
from posttrain_plugins.templates.vision import Expansion, expanded, expansion_of

if TYPE_CHECKING:
    from tokenizers import Encoding

__all__ = ["CLOCK", "Encoded", "Encoder"]

Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools that a conversation may call."""

CLOCK = dt.datetime(2024, 7, 26, 12, 0, 0)
"""What templates that print the date are told, so that the same rows give the same tokens on any day."""

_ASKED: Message = {"role": "user", "content": "Hello"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@dataclass(frozen=True)
class _Job:
    """Texts to tokenize, and what is made of their tokens."""

    texts: tuple[str, ...]
    finish: Callable[[Sequence[Encoding]], Encoded]


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
        """Every id that ends a generation, by the template, the generation config and the tokenizer.

        Of the template it is what closes the last turn of a conversation: an answer, or a call of tools.
        """
        ends = (self.eos_id, self.end_of_turn, *self.call_ends, *self._generation_eos)
        return tuple(sorted({end for end in ends if end is not None}))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that closes an assistant's answer in the chat template; None without one."""
        return self._end_of([_ASKED, {"role": "assistant", "content": "Good day."}])

    @cached_property
    def call_ends(self) -> tuple[int, ...]:
        """The tokens that close an assistant's calls of tools in the chat template."""
        written = ({"word": "sea"}, '{"word": "sea"}')
        calls = [
            {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            for arguments in written
        ]
        answers = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
        ends = (self._end_of([_ASKED, answer], [_TOOL]) for answer in answers)
        return tuple(sorted({end for end in ends if end is not None}))

    @cached_property
    def bos_twice(self) -> bool:
        """Whether the chat template prints a beginning-of-sequence token and the tokenizer would add one."""
        bos = self.files.special_tokens.get("bos_token")
        if self.template is None or bos is None or not self.files.prefix:
            return False
        try:
            return self.template.render([_ASKED], True, now=self._now).startswith(bos)
        except Refusal:
            return False

    @cached_property
    def expansion(self) -> Expansion | None:
        """What images become; None for a model that takes none."""
        return expansion_of(self._directory)

    @cached_property
    def reader(self) -> Reader:
        """What renders passages and tells what is supervised."""
        return Reader(self.template, self._controls, self._now, str(self._directory))

    def read(self, passage: Passage) -> Reading:
        """Return a passage as text, with the characters that are supervised.

        Raises:
            DataError: There is no chat template, or it declines the conversation, leaves a turn open, shows nothing
                of what is to be learned, or does with strings what cannot be followed.
        """
        return self.reader.read(passage)

    def encode(self, passages: Sequence[Passage]) -> list[Encoded | DataError]:
        """Tokenize passages together.

        A conversation is supervised where its reading says. Two strings are joined as they are and closed with an
        end-of-sequence token; the prompt's tokens are those of `encode_prompt`, since a generation starts from them.
        Where an answer is given in steps, the last token of each is told.

        Returns:
            What `read` gives as tokens; an error stands in the place of a passage that has to be refused.
        """
        jobs = [_attempt(self._job, passage) for passage in passages]
        texts = [text for job in jobs if isinstance(job, _Job) for text in job.texts]
        encodings = iter(self.files.plain.encode_batch(texts, add_special_tokens=False))
        encoded: list[Encoded | DataError] = []
        for job, passage in zip(jobs, passages, strict=True):
            made = (
                job
                if isinstance(job, DataError)
                else _attempt(job.finish, [next(encodings) for _ in job.texts])
            )
            whole = expanded(self.expansion, made, passage.images)
            encoded.append(moved(whole) if isinstance(whole, Encoded) and whole.steps else whole)
        return encoded

    def encode_text(self, text: str) -> Encoded:
        """Tokenize plain text, all supervised, between the tokenizer's own first token and an end token."""
        return self._one(Passage("completion", None, text))

    def encode_prompt(
        self, prompt: Turns, tools: Tools = None, arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokenize a prompt: a string as it is, messages with their tools and what opens an answer."""
        return self._one(Passage("prompt", prompt, None, tools, arguments or {})).tokens

    def encode_pair(
        self,
        prompt: Turns,
        completion: Turns,
        tools: Tools = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Encoded:
        """Tokenize a prompt with its completion, which alone is supervised.

        Args:
            prompt: A string or messages.
            completion: A string or messages.
            tools: JSON schemas that the chat template is given; two strings have no place for them.
            arguments: What the chat template is given besides.

        Raises:
            DataError: As `read`, or there is no token to end a string with.
        """
        return self._one(Passage("completion", prompt, completion, tools, arguments or {}))

    def encode_messages(self, messages: Sequence[Message], tools: Tools = None) -> Encoded:
        """Tokenize a conversation whose assistant turns are supervised, each up to its end-of-turn token.

        Raises:
            DataError: As `read`, or no turn is the assistant's.
        """
        return self._one(Passage("completion", None, messages, tools))

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

    @cached_property
    def _controls(self) -> Controls:
        return Controls(self.files)

    @cached_property
    def _seams(self) -> Seams:
        end = next((i for i in (self.eos_id, *self._generation_eos) if i is not None), None)
        return Seams(self.files, end, str(self._directory))

    def _one(self, passage: Passage) -> Encoded:
        (encoded,) = self.encode([passage])
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def _job(self, passage: Passage) -> _Job:
        prompt, completion, seams = passage.prompt, passage.completion, self._seams
        if passage.conversational:
            return self._conversation(self.read(passage))
        before, answer = str(prompt or ""), str(completion or "")
        require_characters(before + answer)
        if completion is None:
            return _Job((before,), lambda found: seams.prompt(found[0]))
        if passage.steps:
            reading = self.read(passage)
            return _Job(
                (reading.text,), lambda found: tokenized_steps(self.files, found[0], reading, self._apart)
            )
        if prompt is None:
            return _Job((answer,), lambda found: seams.text(found[0]))
        return _Job(
            (before + answer, before), lambda found: seams.pair(found[0], found[1], answer, len(before))
        )

    def _conversation(self, reading: Reading) -> _Job:
        if not reading.controls:
            return _Job((reading.text,), lambda found: self._marked(found[0], reading))
        spelled = sorted({reading.text[start:end] for start, end in reading.controls})
        message = f"messages spell control tokens, which become plain text: {', '.join(map(repr, spelled))}"
        notes = (*reading.notes, Note("control-token", message))
        ids, offsets = self._controls.encode(reading.text, reading.controls)
        encoded = marked_steps(masked(ids, offsets, reading.spans), offsets, reading, self._apart)
        return _Job((), lambda _: _noted(encoded, (*notes, *encoded.notes)))

    def _marked(self, encoding: Encoding, reading: Reading) -> Encoded:
        encoded = marked(encoding, reading.spans)
        if reading.steps:
            encoded = marked_steps(encoded, encoding.offsets, reading, self._apart)
        return _noted(encoded, (*reading.notes, *encoded.notes))

    def _apart(self, reading: Reading) -> Encoded:
        beginning = reading.text[: reading.steps[0]]
        if reading.controls:
            return one_by_one(self.files, *self._controls.encode(beginning, reading.controls), reading)
        encoding = self.files.plain.encode(beginning, add_special_tokens=False)
        return one_by_one(self.files, encoding.ids, encoding.offsets, reading)

    def _end_of(self, messages: Sequence[Message], tools: Tools = None) -> int | None:
        """Return the token that closes the last turn of a conversation, if the template renders and closes it."""
        if self.template is None:
            return None
        try:
            turns = self.read(Passage("completion", None, messages, tools)).turns
        except DataError:
            return None
        token = turns[-1].end_of_turn
        found: int | None = None if token is None else self.files.plain.token_to_id(token)
        return found


def _noted(encoded: Encoded, notes: tuple[Note, ...]) -> Encoded:
    """Return a conversation's tokens with its notes; nothing predicts the first token."""
    return replace(encoded.without_first(), notes=notes) if notes else encoded.without_first()


T = TypeVar("T")
R = TypeVar("R")


def _attempt(function: Callable[[T], R], value: T) -> R | DataError:
    try:
        return function(value)
    except DataError as error:
        return error
