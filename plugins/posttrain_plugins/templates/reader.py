"""Reading passages: rendering them, and telling what the assistant has to produce."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from posttrain.artifacts.fingerprint import Refusal
from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages, completion_messages
from posttrain_plugins.templates.calling import WITH_CALLS, shows_calls
from posttrain_plugins.templates.casting import Finding
from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.marks import differences
from posttrain_plugins.templates.moulds import Moulds
from posttrain_plugins.templates.omissions import omissions
from posttrain_plugins.templates.reading import Note, Reading, Span, require_characters
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.steps import continued, turn_ends
from posttrain_plugins.templates.structures import Structures
from posttrain_plugins.templates.tracing import Tracer
from posttrain_plugins.templates.turns import Conversation, Locator

WEIGHT = "weight"
"""The field that says whether an assistant's message is learned, as OpenAI's format has it."""


@dataclass
class Reader:
    """Reads passages with one chat template.

    Args:
        template: The chat template; None for a model that takes plain strings alone.
        controls: The control tokens.
        now: The date that the template is told.
        where: What has the template, for errors.
        moulds: What structures render to.
    """

    template: ChatTemplate | None
    controls: Controls
    now: dt.datetime
    where: str
    moulds: Moulds = field(default_factory=Moulds)

    def read(self, passage: Passage) -> Reading:
        """Return a passage as text, with the characters that are supervised.

        Strings are joined as they are and have no turns.

        Raises:
            DataError: There is no chat template, or it declines the conversation, leaves a turn open, shows nothing
                of what is to be learned, or does with strings what cannot be followed.
        """
        if not passage.conversational:
            return _strings(passage)
        if not passage.steps:
            return self.conversation(_conversation(passage))
        if isinstance(passage.completion, str):
            return self._continued(passage)
        reading = self.conversation(_conversation(passage))
        return replace(reading, steps=turn_ends(passage, reading))

    def _continued(self, passage: Passage) -> Reading:
        """Read a string in steps, taken as it is, behind the messages of its prompt and what opens an answer."""
        require_characters(str(passage.completion))
        return continued(self.conversation(_conversation(replace(passage, completion=None))), passage)

    def conversation(self, conversation: Conversation) -> Reading:
        """Return a conversation as text.

        Raises:
            DataError: As `read`.
        """
        template = self._required()
        asked = (
            conversation.messages,
            conversation.open,
            conversation.tools,
            self.now,
            conversation.arguments,
        )
        try:
            variables = template.variables(*asked)
            text = template.written(variables)
            require_characters(text)
            messages = variables["messages"]
            structure = self._structures.of(
                messages, conversation.tools, conversation.arguments, conversation.learned, conversation.open
            )
            mould = self.moulds.get(structure)
            reading = None if mould is None else mould.reading(messages, text, self.controls)
            if reading is None:
                finding = self._finding(conversation, messages, text)
                reading = finding.reading(self.controls)
                if structure not in self.moulds:
                    self.moulds.keep(structure, finding.mould(self.controls))
        except Refusal as refusal:
            raise _declined(refusal, conversation, template) from refusal
        if conversation.learned and not reading.spans:
            raise _nothing_shown(reading.notes, conversation)
        return reading

    def _finding(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], text: str
    ) -> Finding:
        """Trace a conversation and find its turns."""
        trace = self._tracer.trace(
            conversation.messages, conversation.open, conversation.tools, self.now, conversation.arguments
        )
        if trace.text != text:
            raise _untraceable(text, trace.text)
        locator = Locator(conversation, trace, self._tracer, self.controls.atoms, self.now)
        turns = locator.turns()
        notes = (*locator.notes, *omissions(messages, conversation.tools, trace), *differences(trace, turns))
        turns = [
            replace(turn, notes=tuple(note for note in notes if note.turn == turn.message)) for turn in turns
        ]
        return Finding(messages, trace, turns, tuple(locator.starts), locator.closing, notes)

    def _required(self) -> ChatTemplate:
        if self.template is None:
            raise DataError(
                "the rows are conversations but the model has no chat template",
                where=self.where,
                fix="give it one (`template: chatml` of `model.load`), or use rows of plain strings",
            )
        return self.template

    @cached_property
    def _tracer(self) -> Tracer:
        return Tracer(self._required())

    @cached_property
    def _structures(self) -> Structures:
        return Structures(self._required().source)


def _strings(passage: Passage) -> Reading:
    before, after = str(passage.prompt or ""), passage.completion
    whole = before + str(after or "")
    require_characters(whole)
    if passage.steps:
        return continued(Reading(before), passage)
    if after is None:
        return Reading(before)
    return Reading(whole, (Span(len(before), len(whole)),) if after else ())


def _conversation(passage: Passage) -> Conversation:
    before = [] if passage.prompt is None else as_messages(passage.prompt)
    tools, arguments = passage.tools or None, passage.arguments or {}
    if passage.completion is None:
        return Conversation(_weightless(before), (), tools, arguments, open=True)
    messages = [*before, *completion_messages(passage.completion)]
    answers = [
        (number, _weight(messages[number], number))
        for number in range(len(before), len(messages))
        if messages[number].get("role") == "assistant"
    ]
    learned = tuple(number for number, weight in answers if weight)
    if not learned:
        has = "every assistant turn has weight 0" if answers else "the conversation has no assistant turn"
        raise DataError(f"{has}, so there is nothing to learn from", found=_roles(messages))
    return Conversation(_weightless(messages), learned, tools, arguments)


def _weight(message: Mapping[str, Any], number: int) -> bool:
    weight = message.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise DataError(
            f"message {number + 1} has a weight that is neither 0 nor 1",
            found=repr(weight),
            fix="give whole rows a weight in a column of their own (`weight_column`)",
        )
    return weight is None or weight == 1


def _weightless(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not any(WEIGHT in message for message in messages):
        return messages
    return [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return "turns " + ", ".join(str(message.get("role")) for message in messages)


def _declined(refusal: Refusal, conversation: Conversation, template: ChatTemplate) -> DataError:
    calls = (
        number
        for number, message in enumerate(conversation.messages, 1)
        if message.get("tool_calls") and message.get("content") is None
    )
    number = next(calls, None)
    if number is not None and not shows_calls(template.source):
        return DataError(
            f"the chat template declines this conversation: message {number} has tool calls and no content, and "
            f"the template does not show tool calls ({refusal})",
            found=_roles(conversation.messages),
            fix=f"give the model a template that shows them (`template` of `model.load`): {', '.join(WITH_CALLS)}",
        )
    return DataError(
        f"the chat template declines this conversation: {refusal}",
        found=_roles(conversation.messages),
        fix="change the rows to what the template takes, or use another template",
    )


def _nothing_shown(notes: Sequence[Note], conversation: Conversation) -> DataError:
    why = "; ".join(dict.fromkeys(note.message for note in notes))
    return DataError(
        f"the chat template shows nothing of the assistant's turns: {why}",
        found=_roles(conversation.messages),
        fix="change the rows to what the template shows, or use another template",
    )


def _untraceable(plain: str, traced: str) -> DataError:
    at = next((i for i, (a, b) in enumerate(zip(plain, traced, strict=False)) if a != b), len(plain))
    return DataError(
        "what the chat template makes of strings cannot be followed (it may write something different each time), "
        "so answers cannot be told from the rest",
        where=f"character {at} of the rendered text",
        found=repr(traced[at : at + 24]),
        expected=repr(plain[at : at + 24]),
        fix="use another template",
    )
