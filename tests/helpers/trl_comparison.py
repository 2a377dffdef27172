"""Comparing what posttrain and TRL make of the same conversation with the same tokenizer and template."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from helpers.scripts import Conversation, Message, assistant
from helpers.trl_differences import Difference, Opening, Scene
from helpers.trl_masks import (
    Prepared,
    Subject,
    dpo,
    kto,
    opened,
    rendered,
    row_of,
    sft,
    streamed,
    training_template,
)
from jinja2 import TemplateError

from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.templates.encoder import CLOCK, Encoder

Found = frozenset[Difference]
"""The kinds of difference that a pair of preparations shows; none when they are equal."""
EQUAL: Found = frozenset()
REJECTED = assistant("αλλά")


@contextmanager
def standing_clock(now: dt.datetime = CLOCK) -> Iterator[None]:
    """Let transformers tell templates one date, as posttrain does; what differs is then not the date."""
    from transformers.utils import chat_template_utils

    class Standing(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Standing)
        yield


@dataclass
class Bench:
    """One template with a tokenizer of one kind, on both sides.

    Args:
        subject: The template.
        kind: The tokenizer's.
        directory: Where to write models to.
    """

    subject: Subject
    kind: str
    directory: Path

    @cached_property
    def _own(self) -> Path:
        return self.subject.write(self.directory / "own", self.kind)

    @cached_property
    def tokenizer(self) -> Any:
        """TRL's side."""
        return opened(self._own)

    @cached_property
    def encoder(self) -> Encoder:
        """posttrain's side."""
        return Encoder.open(self._own)

    @cached_property
    def patched(self) -> str | None:
        """What TRL renders for `assistant_only_loss` in place of the template.

        Raises:
            ValueError: There is no such template.
        """
        return training_template(self.tokenizer)

    @cached_property
    def _patched_encoder(self) -> Encoder:
        directory = self.directory / "patched"
        copytree(self._own, directory)
        (directory / "chat_template.jinja").write_text(str(self.patched), encoding="utf-8")
        return Encoder.open(directory)

    def messages(self, conversation: Conversation) -> Found:
        """Compare `messages` with `assistant_only_loss`."""
        turns = self.subject.messages(conversation.messages)
        whole = Passage("completion", None, turns, conversation.tools)
        row = row_of({"messages": turns}, conversation.tools)
        try:
            patched = self.patched
        except ValueError as error:
            assert "patching is not supported" in str(error)
            assert not isinstance(self._encoded(self.encoder, whole), DataError) or self._declines(
                conversation
            )
            return frozenset({Difference.NO_PATCH})
        theirs = _attempt(
            lambda: sft(self.tokenizer, streamed([row]), template=patched, assistant_only_loss=True)
        )
        if theirs is None:
            assert self._refused(whole), "TRL refuses what posttrain takes"
            assert self._declines(conversation, patched)
            return frozenset({Difference.DECLINED})
        pair = Prepared.of(theirs[0])
        if self._refused(whole):
            assert self._declines(conversation) and patched is not None
            return self._compared(self._patched_encoder, pair, whole, conversation, patched) | {
                Difference.ONLY_PATCHED
            }
        own = rendered(self.tokenizer, turns, conversation, None)
        text = rendered(self.tokenizer, turns, conversation, patched)
        reading = self.encoder.read(whole)
        assert reading.text.startswith(own)
        if text in (own, reading.text):
            return self._compared(self.encoder, pair, whole, conversation, patched)
        return self._compared(self._patched_encoder, pair, whole, conversation, patched) | {
            Difference.PATCHED
        }

    def completion(self, conversation: Conversation) -> Found:
        """Compare `prompt` and `completion`, as `SFTTrainer` and as `KTOTrainer` prepare them."""
        *before, last = self.subject.messages(conversation.messages)
        row = row_of({"prompt": before, "completion": [last]}, conversation.tools)
        passage = Passage("completion", before, [last], conversation.tools)
        found = self._prepared(
            passage, conversation, lambda: Prepared.of(sft(self.tokenizer, streamed([row]))[0])
        )
        labelled = {**row, "label": True}
        again = self._prepared(
            passage,
            conversation,
            lambda: Prepared.answer(kto(self.tokenizer, streamed([labelled]))[0], "completion"),
        )
        assert found == again, "TRL's trainers prepare the same"
        return found

    def preference(self, conversation: Conversation) -> Found:
        """Compare `prompt`, `chosen` and `rejected`."""
        *before, last, other = self.subject.messages([*conversation.messages, REJECTED])
        row = row_of({"prompt": before, "chosen": [last], "rejected": [other]}, conversation.tools)
        theirs = _attempt(lambda: dpo(self.tokenizer, streamed([row])))
        found: set[Difference] = set()
        sides = (("chosen", last, conversation.messages[-1]), ("rejected", other, REJECTED))
        for side, answer, said in sides:
            passage = Passage(side, before, [answer], conversation.tools)
            seen = Conversation([*conversation.messages[:-1], said], conversation.tools)
            found |= self._prepared(
                passage,
                seen,
                lambda side=side: None if theirs is None else Prepared.answer(theirs[0], side),  # type: ignore[misc]
            )
        return frozenset(found)

    def _prepared(
        self, passage: Passage, conversation: Conversation, prepare: Callable[[], Prepared | None]
    ) -> Found:
        theirs = _attempt(prepare)
        if theirs is None or self._refused(passage):
            assert theirs is None and self._refused(passage), "one side refuses alone"
            return frozenset({Difference.DECLINED})
        return self._compared(self.encoder, theirs, passage, conversation, None)

    def _compared(
        self,
        encoder: Encoder,
        theirs: Prepared,
        passage: Passage,
        conversation: Conversation,
        template: str | None,
    ) -> Found:
        """Compare the tokens and what is learned of them, on one text."""
        mine, reading = self._encoded(encoder, passage), encoder.read(passage)
        assert not isinstance(mine, DataError)
        turns = self.subject.messages(conversation.messages)
        text = rendered(self.tokenizer, turns, conversation, template)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoding["offset_mapping"]
        assert theirs.tokens == encoding["input_ids"], "TRL's tokens are those of the text"
        scene = Scene(
            text,
            reading,
            dict(self._openings(turns, conversation, template)),
            set(self.tokenizer.all_special_tokens) | set(self.subject.tokens),
            [number for number, turn in enumerate(turns) if turn.get("tool_calls")],
        )
        found = set(scene.differences(offsets, theirs.learned))
        expected = [False] + [scene.inside(*place) for place in offsets[1:]]
        tokens = theirs.tokens
        if reading.text != text:
            closing = mine.tokens[-1]
            assert reading.text.startswith(text) and closing in encoder.stop_ids
            assert any(note.code == "no-end-of-turn" for note in reading.notes)
            tokens, expected = [*tokens, closing], [*expected, True]
            found.add(Difference.OPENED)
        if reading.controls:
            _assert_plain(encoder, mine.tokens, tokens, reading)
            found.add(Difference.CONTROL)
        else:
            assert mine.tokens == tokens
            assert list(map(bool, mine.supervised)) == expected
        return frozenset(found)

    def _openings(
        self, turns: Sequence[Message], conversation: Conversation, template: str | None
    ) -> Iterator[tuple[int, Opening]]:
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = partial(rendered, self.tokenizer, turns[:number], conversation, template)
                closed, whole = _attempt(before), _attempt(partial(before, True))
                if closed is not None and whole is not None:
                    yield number, Opening(closed, whole)

    def _encoded(self, encoder: Encoder, passage: Passage) -> Any:
        (encoded,) = encoder.encode([passage])
        return encoded

    def _refused(self, passage: Passage) -> bool:
        encoded = self._encoded(self.encoder, passage)
        refused = isinstance(encoded, DataError)
        assert not refused or "declines this conversation" in encoded.message
        return refused

    def _declines(self, conversation: Conversation, template: str | None = None) -> bool:
        """Whether the template, or another, raises in transformers."""
        turns = self.subject.messages(conversation.messages)
        return _attempt(lambda: rendered(self.tokenizer, turns, conversation, template)) is None


def _assert_plain(encoder: Encoder, mine: Sequence[int], theirs: Sequence[int], reading: Any) -> None:
    """The control tokens that messages spell are tokens to TRL, and are not to posttrain."""
    spelled = [reading.text[start:end] for start, end in reading.controls]
    for token in set(spelled):
        id = encoder.files.plain.token_to_id(token)
        assert theirs.count(id) == mine.count(id) + spelled.count(token)


def _attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or None where the template declines."""
    try:
        return function()
    except (TemplateError, TypeError):
        return None
