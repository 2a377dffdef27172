"""How posttrain's tokens and masks of a conversation differ from TRL's: a closed list, each kind told by its own signs.

What is none of them is an error: `Scene` says which kind a token is of that only one side learns, or raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from helpers.scripts import ASSISTANT, OTHERS, wrote

from posttrain_plugins.templates.reading import Reading, Turn


class Explained(NamedTuple):
    """What differs, and why posttrain does it its way."""

    what: str
    why: str


class Difference(Enum):
    """One kind of difference; its value is a name for tables and what is behind it."""

    PATCHED = (
        "other text",
        Explained(
            "TRL renders its own patched template, which writes another text than the model's template does",
            "the model is used with its own template; masks come from tracing it, so none has to be patched",
        ),
    )
    PROMPT = (
        "prompt",
        Explained(
            "TRL also learns what the generation prompt supplies: a header, `<think>`",
            "a generation starts behind it, so the model never has to write it",
        ),
    )
    BLANK = (
        "blank",
        Explained(
            "TRL also learns white space behind the end of turn",
            "the model has stopped by then; in a conversation the template writes it",
        ),
    )
    SECOND_END = (
        "second end",
        Explained(
            "TRL also learns a second end token that the template prints behind the last turn's own",
            "the turn ends with the first; the second is never reached, and other turns have none",
        ),
    )
    EMPTY_TURN = (
        "empty turn",
        Explained(
            "TRL learns the end of a turn of which the template shows nothing, such as a tool call that it drops",
            "it would teach to say nothing where the row says something; a note (`dropped-turn`) tells it",
        ),
    )
    CALL_END = (
        "end of call",
        Explained(
            "posttrain also learns the token that ends a turn with tool calls",
            "a model that does not write it goes on and makes the tool's answer up",
        ),
    )
    HEADER = (
        "header",
        Explained(
            "posttrain also learns a header that the template writes in a conversation, but not as what opens an "
            "answer to a tool",
            "a generation starts without it, so the model has to write it, or sees what it has not been trained on",
        ),
    )
    STRADDLING = (
        "straddling",
        Explained(
            "TRL also learns a token that begins in the prompt and ends in the answer",
            "a generation that starts behind the prompt cannot produce it; such tokens are counted in the report",
        ),
    )
    OPENED = (
        "closed",
        Explained(
            "posttrain adds the token that opens the next message behind a last turn that the template leaves open",
            "nothing else would teach the model to stop; a note (`no-end-of-turn`) tells it",
        ),
    )
    CONTROL = (
        "control token",
        Explained(
            "a message spells a control token; TRL makes it one, posttrain keeps it plain text",
            "a user's text could end the turn; a note (`control-token`) tells it",
        ),
    )
    ONLY_PATCHED = (
        "only patched",
        Explained(
            "the model's template declines the conversation, TRL's patched one takes it",
            "with its own template the model could not be used for such conversations",
        ),
    )
    NO_PATCH = (
        "no patch",
        Explained(
            "TRL refuses `assistant_only_loss`: the template has no generation markers and none is stored for it",
            "the template is traced, so any will do",
        ),
    )
    DECLINED = (
        "declined",
        Explained("no difference: both refuse, as the template declines the conversation", "—"),
    )

    @property
    def title(self) -> str:
        """Its name in tables."""
        name: str = self.value[0]
        return name

    @property
    def explained(self) -> Explained:
        """What is behind it."""
        explained: Explained = self.value[1]
        return explained


class Opening(NamedTuple):
    """What the messages before an assistant's render to: without and with what opens an answer."""

    closed: str
    whole: str

    @property
    def prompt(self) -> str:
        """What opens an answer."""
        return self.whole[common(self.closed, self.whole) :]


def common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Scene:
    """One text of which both sides say what is learned.

    Args:
        text: The text, as transformers renders it.
        reading: posttrain's reading of it.
        openings: What comes before each message of the assistant.
        special: The special tokens.
        calls: The messages that call tools.
    """

    text: str
    reading: Reading
    openings: Mapping[int, Opening]
    special: Collection[str]
    calls: Collection[int]

    def inside(self, start: int, end: int) -> bool:
        """Whether posttrain learns a token of these characters."""
        return any(span.start <= start and end <= span.end for span in self.reading.spans)

    def differences(self, offsets: Sequence[tuple[int, int]], theirs: Sequence[bool]) -> Iterator[Difference]:
        """Yield the kind of every token that only one side learns; the first of a text is learned by nobody."""
        for (start, end), learned in list(zip(offsets, theirs, strict=True))[1:]:
            if learned and not self.inside(start, end):
                yield self._theirs_alone(start, end)
            elif not learned and self.inside(start, end):
                yield self._ours_alone(start, end)

    def _theirs_alone(self, start: int, end: int) -> Difference:
        if any(start < span.start < end for span in self.reading.spans):
            return Difference.STRADDLING
        behind = any(
            span.end <= start and not self.text[span.end : start].strip() for span in self.reading.spans
        )
        if behind and self.text[start:end].isspace():
            return Difference.BLANK
        if behind and self.text[start:end] in self.special and end == len(self.text):
            return Difference.SECOND_END
        if self._of_an_empty_turn(start, end):
            return Difference.EMPTY_TURN
        if self._supplied(start, end):
            return Difference.PROMPT
        raise AssertionError(f"TRL alone learns {self._shown(start, end)}")

    def _supplied(self, start: int, end: int) -> bool:
        """Whether the prompt of a turn has these characters, and nothing of the conversation is behind them."""
        for turn in self.reading.turns:
            prompt = self.openings[turn.message].prompt
            begin = turn.span.start - len(prompt)
            if begin <= start and end <= turn.span.start and self.text.startswith(prompt, begin):
                return True
        reached = map(self._reached, self.openings.values())
        return any(end <= agreed and not _said(self.text[start:agreed]) for agreed in reached)

    def _of_an_empty_turn(self, start: int, end: int) -> bool:
        """Whether these characters end a turn that begins right where its message would, had it been shown."""
        dropped = {note.turn for note in self.reading.notes if note.code == "dropped-turn"}
        for number in dropped.intersection(self.openings):
            begin = self._reached(self.openings[number])
            between = self.text[begin:end].strip()
            if begin < end and (not between or between in self.special):
                return True
        return False

    def _reached(self, opening: Opening) -> int:
        """Return how far the text agrees with what a prompt renders to, in whole tokens."""
        place = common(self.text, opening.whole)
        cut = (
            at
            for token in self.special
            for at in range(max(0, place - len(token) + 1), place)
            if self.text.startswith(token, at)
        )
        return min(cut, default=place)

    def _ours_alone(self, start: int, end: int) -> Difference:
        turn = self._turn(start)
        if end == turn.span.end and self.text[start:end].strip() == turn.end_of_turn:
            if turn.message in self.calls:
                return Difference.CALL_END
        elif turn.own and end <= turn.own[0].start:
            whole = self.openings[turn.message].whole
            if self.text.startswith(whole) and len(whole) <= start:
                return Difference.HEADER
        raise AssertionError(f"posttrain alone learns {self._shown(start, end)}")

    def _turn(self, place: int) -> Turn:
        return next(turn for turn in self.reading.turns if turn.span.start <= place < turn.span.end)

    def _shown(self, start: int, end: int) -> str:
        return f"{self.text[start:end]!r} in {self.text[max(0, start - 80) : end + 40]!r}"


def _said(text: str) -> bool:
    """Whether somebody said something of a text: the characters tell it."""
    return any(wrote(script, text) for script in (ASSISTANT, *OTHERS))
