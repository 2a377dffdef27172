"""What there is to see: a dataset as a whole, and single rows as training takes them. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from itertools import groupby
from typing import Any

from posttrain_plugins.inspection.statistics import Statistics


class Look(Enum):
    """What there is to see about a token: the first of these that holds, from the bottom."""

    GIVEN = auto()
    LEARNED = auto()
    STRADDLING = auto()
    LOOSE = auto()
    """Characters that no token covers."""
    CUT = auto()


@dataclass(frozen=True)
class Piece:
    """One token where it stands in the text.

    Args:
        text: The characters it covers; none for the later tokens of one character, or for a token that the
            text does not show, such as one that the tokenizer puts first.
        id: The token's id; None for characters that no token covers.
        name: The token as the vocabulary writes it.
        supervised: Whether it is learned.
        straddling: Whether it begins before an answer and ends inside it, and so is not learned.
        special: Whether it is an added token of the tokenizer.
        cut: Whether truncation takes it away.
        unknown: Whether it is what the tokenizer puts for what it does not know.
    """

    text: str
    id: int | None
    name: str
    supervised: bool = False
    straddling: bool = False
    special: bool = False
    cut: bool = False
    unknown: bool = False

    @property
    def look(self) -> Look:
        """How it is to be shown. What is cut is not there at all, whatever else it is."""
        if self.cut:
            return Look.CUT
        if self.id is None:
            return Look.LOOSE
        if self.straddling:
            return Look.STRADDLING
        return Look.LEARNED if self.supervised else Look.GIVEN

    @property
    def shown(self) -> str:
        """The characters to show: a special token that the text does not show is shown by its name."""
        return self.text or (self.name if self.special else "")


def folded(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces to look at: many equal special tokens in a row, as images become, are one with their number."""
    shown: list[Piece] = []
    for piece, run in groupby(pieces):
        count = sum(1 for _ in run)
        repeats = piece.special and not piece.text and count > 1
        shown.extend([replace(piece, text=f"{piece.name}×{count}")] if repeats else [piece] * count)
    return shown


@dataclass(frozen=True)
class Remark:
    """Something to know about a row: the note of a reading, with what can be done about it.

    Args:
        code: What kind of thing, such as `dropped-field`.
        message: What it is.
        turn: The message it is about, from 0.
        fix: What to do about it, where something is to be done.
    """

    code: str
    message: str
    turn: int | None = None
    fix: str | None = None


@dataclass(frozen=True)
class Turn:
    """A message of the conversation.

    Args:
        part: What it belongs to: `prompt`, or the role of a sequence (`completion`, `chosen`, `rejected`).
        role: Who speaks.
        content: The text; parts that are no text are named in it.
        fields: What else the message has, such as `tool_calls`, as JSON.
    """

    part: str
    role: str
    content: str
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One token sequence of a row.

    Args:
        role: What it is to the row: `completion`, `chosen`, `rejected`, `prompt`.
        pieces: Its text as tokens, cut ones included.
        remarks: What its reading noted.
        images: How many images it has.
    """

    role: str
    pieces: tuple[Piece, ...]
    remarks: tuple[Remark, ...] = ()
    images: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Tokens as training gets them, those of them that are learned, straddling ones, and those cut off."""
        kept = [piece for piece in self.pieces if piece.id is not None and not piece.cut]
        return {
            "tokens": len(kept),
            "supervised": sum(piece.supervised for piece in kept),
            "straddling": sum(piece.straddling for piece in kept),
            "cut": sum(piece.cut for piece in self.pieces if piece.id is not None),
        }


@dataclass(frozen=True)
class RowView:
    """One row.

    Args:
        number: Its number, from 1.
        place: Where it stands in its file, such as `line 7`.
        turns: The conversation; strings are turns without a role.
        tools: The tools' JSON schemas, one a line.
        others: Columns beside those of the format, as JSON.
        sides: The token sequences; none when the row cannot be encoded.
        common: How many pieces all sides begin with, up to the first that is learned; 0 with one side.
        dropped: Why training leaves the row out; None when it takes it.
    """

    number: int
    place: str
    turns: tuple[Turn, ...]
    tools: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    sides: tuple[Side, ...] = ()
    common: int = 0
    dropped: str | None = None


@dataclass(frozen=True)
class TokenName:
    """A token by id and name."""

    id: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"


@dataclass(frozen=True)
class ModelView:
    """What of a model decides how rows are read.

    Args:
        label: The directory or artifact.
        template: Fingerprint of the template's tokens; None without a template.
        template_text: Fingerprint of the template's text.
        tokenizer: Hash of the tokenizer.
        end_of_turn: The token that closes an assistant's answer.
        stops: Every token that ends a generation.
        bos: The beginning-of-sequence token.
        eos: The end-of-sequence token.
        pad: The token that batches are filled with.
        context: The longest sequence that the model takes, in tokens.
        remarks: What is worth knowing about pad, end and beginning tokens.
    """

    label: str
    template: str | None
    template_text: str | None
    tokenizer: str
    end_of_turn: TokenName | None
    stops: tuple[TokenName, ...]
    bos: TokenName | None
    eos: TokenName | None
    pad: TokenName | None
    context: int | None
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Kept:
    """Rows of one kind: how many, and the numbers of the first ones, from 1."""

    count: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Training:
    """What training would get of the whole dataset.

    Args:
        trainer: The trainer that was asked.
        max_length: Its longest sequence, in tokens.
        truncation: What becomes of longer ones.
        usable: Rows that it takes.
        dropped: Rows left out, by reason.
        truncated: Rows that are shortened.
        lost: Tokens that truncation takes.
        straddling: Rows with a token that is half prompt and half answer.
        tokens: Tokens of all sequences.
        supervised: Those that are learned.
        masked: Rows that training takes with a sequence of which nothing is learned: there must be none.
        unmasked: Rows with a sequence of which all but the first token is learned.
        intended: Whether all is to be learned, so that nothing is wrong with such rows.
        examples: How many examples the rows hold, where they hold several: these are counted instead of rows.
        remarks: What the chat template does not show as it is: rows, and what can be done.
    """

    trainer: str
    max_length: int | None
    truncation: str
    usable: int
    dropped: Mapping[str, Kept]
    truncated: int
    lost: int
    straddling: int
    tokens: int
    supervised: int
    masked: Kept
    unmasked: Kept
    intended: bool = False
    examples: int | None = None
    remarks: tuple[tuple[Kept, Remark], ...] = ()

    @property
    def share(self) -> float:
        """The part of the tokens that is learned."""
        return self.supervised / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Inspection:
    """All of it.

    Args:
        source: The dataset's file or artifact.
        format: Its format.
        rows: How many rows were looked at.
        complete: Whether these are all of them.
        statistics: What the dataset is like.
        model: The model.
        training: What training gets.
        shown: The rows to show.
    """

    source: str
    format: str
    rows: int
    complete: bool
    statistics: Statistics
    model: ModelView
    training: Training
    shown: tuple[RowView, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for machines."""
        shown = [
            {**asdict(row), "sides": [{**asdict(side), **side.counts} for side in row.sides]}
            for row in self.shown
        ]
        training = {**asdict(self.training), "supervised_share": self.training.share}
        return {**asdict(self), "statistics": self.statistics.as_dict(), "training": training, "shown": shown}
