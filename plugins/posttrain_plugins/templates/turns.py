"""Finding what the assistant has to produce in a traced conversation.

A turn begins where the generation prompt ends and ends with the last atomic token that the template itself writes
behind the turn's last own character. Both come from the template: nothing is searched for in what messages say.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from posttrain.artifacts.fingerprint import Refusal
from posttrain.errors import DataError
from posttrain_plugins.templates.atoms import Atom, Atoms, literal, outside_tags
from posttrain_plugins.templates.reading import Note, Span, Turn
from posttrain_plugins.templates.render import Message
from posttrain_plugins.templates.tracing import Run, Trace, Tracer

_NEXT = (
    ({"role": "tool", "name": "f", "content": "Hello"}, True),
    ({"role": "user", "content": "Hello"}, False),
)
"""What may follow a turn, and whether only after tool calls."""


@dataclass(frozen=True)
class Conversation:
    """What is rendered, and which of its messages are learned.

    Args:
        messages: The turns.
        learned: Indices of the assistant's turns that are supervised.
        tools: JSON schemas of the tools.
        arguments: What the template is given besides.
        open: Whether it ends with what opens an answer.
    """

    messages: Sequence[Message]
    learned: tuple[int, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True)
class Start:
    """Where a turn begins.

    Args:
        at: The first character.
        reach: How far the text agrees with the generation prompt.
        missing: What the generation prompt has from `at` on.
        own: Whether some of what agrees with it is the message's own text.
    """

    at: int
    reach: int
    missing: str = ""
    own: bool = False


@dataclass(frozen=True)
class Closing:
    """How a text goes on behind its last character `upto`, when the template leaves its last turn open."""

    upto: int
    text: str


@dataclass
class Locator:
    """Finds the turns of one conversation.

    Args:
        conversation: What was rendered.
        trace: Its traced render.
        tracer: Renders parts of it.
        atoms: Finds atomic tokens.
        now: The date that the template is told.
    """

    conversation: Conversation
    trace: Trace
    tracer: Tracer
    atoms: Atoms
    now: dt.datetime
    notes: list[Note] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    closing: Closing | None = None

    def turns(self) -> list[Turn]:
        """Return the learned turns in order.

        Raises:
            DataError: A turn has no end, so the model would never learn to stop.
        """
        return [turn for number in self.conversation.learned for turn in self._turns(number)]

    def _turns(self, number: int) -> list[Turn]:
        block = self.trace.blocks.get(number) or self._between(number)
        own = self.trace.own(number, block)
        if block.start == block.end or (not own and _says_something(self.conversation.messages[number])):
            self._note(
                "dropped-turn", "the chat template leaves the message out, so it is not learned", number
            )
            return []
        start = self._start(number, block, own)
        limit = self._limit(number, block, start)
        shown = [run for run in own if start.at < run.end <= limit]
        first = self._closed(number, Span(start.at, limit), shown)
        return [first, *self._later(number, Span(limit, block.end), own, {run.piece.source for run in shown})]

    def _start(self, number: int, block: Span, own: Sequence[Run]) -> Start:
        """Return where the turn begins: behind as much of the generation prompt as the text has."""
        text = self.trace.text
        opened = self._opened(number)
        if (
            opened is not None
            and text.startswith(opened.text)
            and block.start <= len(opened.text) <= block.end
        ):
            start = Start(len(opened.text), len(opened.text))
        else:
            start = self._behind(self._prompt(number), block, own)
        if start.missing and start.at == block.start and self._goes_on(block):
            self._note("merged", "the turn goes on where the assistant's last one ends", number)
        elif start.missing:
            what = f"the turn does not begin as the generation prompt does ({start.missing!r} is missing)"
            self._note("partial-prompt", what, number)
        self.starts.append(replace(start, own=any(run.start < start.reach for run in own)))
        return start

    def _behind(self, prompt: str, block: Span, own: Sequence[Run]) -> Start:
        """Return how far a block agrees with a generation prompt, without reaching into an atomic token."""
        text = self.trace.text
        reach = block.start + _common(prompt, text[block.start : block.end])
        if reach == block.start + len(prompt):
            return Start(reach, reach)
        before = outside_tags(text, block.start, min([reach, *(run.start for run in own[:1])]))
        at = next((atom.start for atom in self._literal_atoms if atom.start < before < atom.end), before)
        at = max(at, block.start)
        return Start(at, reach, prompt[at - block.start :])

    def _prompt(self, number: int) -> str:
        """Return what opens the turn, or else another turn, when the text begins with that."""
        own = self._generation_prompt(number)
        block = self.trace.blocks.get(number)
        if block is None or (own and self.trace.text.startswith(own[0], block.start)):
            return own
        others = (self._generation_prompt(other) for other in self.conversation.learned if other != number)
        whole = (prompt for prompt in others if prompt and self.trace.text.startswith(prompt, block.start))
        return next(whole, own)

    def _generation_prompt(self, number: int) -> str:
        opened = self._opened(number)
        if opened is None:
            return ""
        if opened.tail and opened.tail < len(opened.text):
            return opened.text[opened.tail :]
        closed = self._rendered(self.conversation.messages[:number], False)
        return opened.text[0 if closed is None else _common(opened.text, closed.text) :]

    def _opened(self, number: int) -> Trace | None:
        if number not in self._openings:
            self._openings[number] = self._rendered(self.conversation.messages[:number], True)
        return self._openings[number]

    @cached_property
    def _openings(self) -> dict[int, Trace | None]:
        return {}

    def _limit(self, number: int, block: Span, start: Start) -> int:
        """Return where text of other messages begins in a block, or where the block ends."""
        foreign = self._foreign(number, Span(start.at, block.end))
        if not foreign:
            return block.end
        alone = self._rendered(self.conversation.messages[: number + 1], False)
        shared = foreign[0].start if alone is None else _common(self.trace.text, alone.text)
        return max(start.at, min(foreign[0].start, shared))

    def _later(self, number: int, rest: Span, own: Sequence[Run], shown: set[Any]) -> list[Turn]:
        """Return what the message says behind text of other messages, unless it says it again."""
        turns = []
        foreign = [*self._foreign(number, rest), None]
        for place, run in enumerate(foreign[:-1]):
            follower = foreign[place + 1]
            assert run is not None
            end = rest.end if follower is None else follower.start
            fresh = [one for one in own if run.end <= one.start < end and one.piece.source not in shown]
            if fresh:
                self._note("reordered", "other messages stand inside of the turn", number)
                turns.append(self._closed(number, Span(fresh[0].start, end), fresh, first=False))
        return turns

    def _closed(self, number: int, span: Span, own: Sequence[Run], first: bool = True) -> Turn:
        """Return the turn in a span, which ends with the template's last atomic token behind the own text."""
        tail = max([span.start, *(run.end for run in own)])
        atoms = [
            atom for atom in self._literal_atoms if tail <= atom.core.start and atom.core.end <= span.end
        ]
        ends = [atom for atom in atoms if atom.closing]
        turn = Turn(number, Span(span.start, tail), tuple(Span(run.start, run.end) for run in own))
        if ends:
            return self._ended(turn, ends[-1], self.trace.text)
        closed = self._left_open(turn, span.end) if first else None
        if closed is not None:
            return closed
        if atoms:
            return self._ended(turn, atoms[-1], self.trace.text)
        if first:
            raise self._endless(turn)
        self._note("no-end-of-turn", "nothing closes what stands behind other messages", number)
        return turn

    def _ended(self, turn: Turn, atom: Atom, text: str) -> Turn:
        return replace(
            turn, span=Span(turn.span.start, atom.end), end_of_turn=text[atom.start : atom.end].strip()
        )

    def _left_open(self, turn: Turn, limit: int) -> Turn | None:
        """Close a turn whose text has no end of turn: by what follows, or by what would follow."""
        number, text = turn.message, self.trace.text
        if self._is_taken_up(limit):
            self._note("merged", "the assistant's next turn goes on where this one ends", number)
            return replace(turn, span=Span(turn.span.start, limit))
        behind = [atom for atom in self._literal_atoms if limit <= atom.core.start]
        if number == len(self.conversation.messages) - 1:
            if behind:
                return self._ended(turn, behind[-1], text)
            calls = self.conversation.messages[number].get("tool_calls")
            attempts = (self._closed_by(turn, message) for message, after in _NEXT if calls or not after)
            return next((closed for closed in attempts if closed is not None), None)
        if behind and not text[limit : behind[0].core.start].strip() and self._assistant_at(limit) is None:
            self._note("no-end-of-turn", "the turn is closed by what opens the next one", number)
            return self._ended(turn, behind[0], text)
        return None

    def _closed_by(self, turn: Turn, follower: Message) -> Turn | None:
        """Close the last turn with what the template writes once another message follows."""
        longer = self._rendered([*self.conversation.messages, follower], False)
        number, upto = turn.message, turn.span.end
        block = None if longer is None else longer.blocks.get(number)
        if longer is None or block is None:
            return None
        own, rest = longer.own(number, block), self.trace.text[upto:].rstrip()
        kept = own[-1].end if own else block.start + upto - self.trace.blocks.get(number, block).start
        if not longer.text.startswith(rest, kept):
            return None
        behind = kept + len(rest)
        found = literal(self.atoms(longer.text), longer)
        atom = next((atom for atom in found if behind <= atom.core.start), None)
        if atom is None or longer.text[behind : atom.core.start].strip():
            return None
        self.closing = Closing(upto, longer.text[kept : atom.end])
        what = "the turn is closed by what the chat template writes before another"
        self._note("no-end-of-turn", what, number)
        token = longer.text[atom.start : atom.end].strip()
        return replace(turn, span=Span(turn.span.start, upto + atom.end - kept), end_of_turn=token)

    def _endless(self, turn: Turn) -> DataError:
        return DataError(
            f"the chat template closes message {turn.message + 1} with no special token, so the model would "
            "never learn to stop",
            found=repr(self.trace.text[turn.span.end :][:80]),
            fix="use a template that ends the assistant's turn: `template: chatml` of `model.load`",
        )

    def _between(self, number: int) -> Span:
        """Return where a message stands whose loop is not known: what it adds to the render of those before."""
        before = self._rendered(self.conversation.messages[:number], False)
        upto = self._rendered(self.conversation.messages[: number + 1], False)
        if before is None or upto is None:
            return Span(0, 0)
        start, end = (_common(self.trace.text, part.text) for part in (before, upto))
        return Span(start, max(start, end))

    def _rendered(self, messages: Sequence[Message], open_: bool) -> Trace | None:
        conversation = self.conversation
        try:
            return self.tracer.trace(messages, open_, conversation.tools, self.now, conversation.arguments)
        except Refusal:
            return None

    def _foreign(self, number: int, span: Span) -> list[Run]:
        runs = self.trace.runs
        return [
            run for run in runs if run.message not in (None, number) and span.start <= run.start < span.end
        ]

    def _goes_on(self, block: Span) -> bool:
        """Whether an assistant's text ends where a block begins."""
        messages = self.conversation.messages
        ends = [number for number, other in self.trace.blocks.items() if other.end == block.start]
        return any(messages[number].get("role") == "assistant" for number in ends)

    def _assistant_at(self, place: int) -> int | None:
        """Return the assistant's message that begins at a place in the text."""
        messages = self.conversation.messages
        starts = (number for number, block in self.trace.blocks.items() if block.start == place < block.end)
        return next((number for number in starts if messages[number].get("role") == "assistant"), None)

    def _is_taken_up(self, place: int) -> bool:
        """Whether the assistant's turn that begins at a place has nothing that opens it."""
        number = self._assistant_at(place)
        if number is None:
            return False
        prompt, block = self._generation_prompt(number), self.trace.blocks[number]
        return bool(prompt) and self._behind(prompt, block, self.trace.own(number, block)).at == place

    def _note(self, code: str, message: str, turn: int) -> None:
        note = Note(code, message, turn)
        if note not in self.notes:
            self.notes.append(note)

    @cached_property
    def _literal_atoms(self) -> list[Atom]:
        return literal(self.atoms(self.trace.text), self.trace)


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _says_something(message: Message) -> bool:
    fields = ("content", "reasoning_content", "thinking", "reasoning", "tool_calls")
    return any(_holds_something(message.get(field)) for field in fields)


def _holds_something(value: Any) -> bool:
    """Whether a field holds more than white space; of parts, those that are text have to."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list):
        texts = [part["text"] if isinstance(part, Mapping) and "text" in part else part for part in value]
        return any(map(_holds_something, texts))
    return bool(value)
