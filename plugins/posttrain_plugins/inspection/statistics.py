"""What a dataset is like as a whole: lengths, turns, duplicates, what the rows hold."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.artifacts.manifest import digest_of
from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example
from posttrain_plugins.data.conversation import content_text
from posttrain_plugins.data.rows import prompt_hash
from posttrain_plugins.inspection.spread import Spread

_LONGEST = 5
_PERCENT = 100


@dataclass(frozen=True)
class Longest:
    """One of the longest rows: its number, from 1, and its size; tokens where training takes it."""

    number: int
    characters: int
    tokens: int | None = None


@dataclass(frozen=True)
class Tokens:
    """What a model's tokenizer and template make of the rows that training takes.

    Args:
        length: Tokens of a sequence.
        share: Percent of a sequence's tokens that are learned.
        supervised: The part of all tokens that is learned.
        total: All tokens.
    """

    length: Spread | None
    share: Spread | None
    supervised: float
    total: int


@dataclass(frozen=True)
class Statistics:
    """A dataset as a whole.

    Args:
        rows: How many rows there are.
        format: Their format.
        columns: In how many rows each column occurs.
        characters: Characters of a row's texts.
        turns: Messages of a row; a string is none.
        roles: How many messages each role has.
        conversations: Rows that hold messages.
        tools: Rows that offer tools.
        images: Rows with images.
        equal: Rows that equal an earlier one.
        asked: Rows whose prompt an earlier row has.
        longest: The longest rows, by characters.
        tokens: With a model: what its tokenizer makes of them.
    """

    rows: int
    format: str
    columns: Mapping[str, int]
    characters: Spread | None
    turns: Spread | None
    roles: Mapping[str, int]
    conversations: int
    tools: int
    images: int
    equal: int
    asked: int
    longest: tuple[Longest, ...]
    tokens: Tokens | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with the rates that people ask for."""
        whole = self.rows or 1
        rates = {"equal_rate": self.equal / whole, "asked_rate": self.asked / whole}
        return {**asdict(self), **rates}


@dataclass
class Sizes:
    """Tokens of sequences, and how many of them are learned.

    Args:
        lengths: Tokens of each sequence.
        learned: How many of them are learned.
        of_row: Tokens of each row that training takes, by its index.
    """

    lengths: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    of_row: dict[int, int] = field(default_factory=dict)

    def add(self, example: Example) -> None:
        """Count the sequences of an example."""
        self.lengths.extend(len(sequence.tokens) for sequence in example.sequences)
        self.learned.extend(sequence.predicted for sequence in example.sequences)
        self.of_row[example.row] = sum(len(sequence.tokens) for sequence in example.sequences)

    def tokens(self) -> Tokens:
        """Return what there is to say about them."""
        total = sum(self.lengths)
        shares = zip(self.learned, self.lengths, strict=True)
        return Tokens(
            length=Spread.of(self.lengths),
            share=Spread.of([round(_PERCENT * learned / tokens) for learned, tokens in shares]),
            supervised=sum(self.learned) / total if total else 0.0,
            total=total,
        )


@dataclass
class Census:
    """Counts rows one by one, holding numbers and hashes alone."""

    format: str
    characters: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    columns: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    _rows: set[str] = field(default_factory=set)
    _prompts: set[str] = field(default_factory=set)

    def add(self, row: Mapping[str, Any], passages: Sequence[Passage]) -> None:
        """Count a row, given with what it says."""
        messages = [message for part in texts(passages) if not isinstance(part, str) for message in part]
        self.characters.append(sum(map(length, texts(passages))))
        self.turns.append(len(messages))
        self.columns.update(row.keys())
        self.roles.update(str(message.get("role")) for message in messages)
        self.held["conversations"] += bool(messages)
        self.held["tools"] += any(passage.tools for passage in passages)
        self.held["images"] += any(passage.images for passage in passages)
        self.held["equal"] += _seen(digest_of(row), self._rows)
        self.held["asked"] += _seen(prompt_hash(row, self.format), self._prompts)

    def statistics(self, sizes: Sizes | None = None) -> Statistics:
        """Return the statistics, with those of tokens where there are sizes of the rows' sequences."""
        count = len(self.characters)
        longest = heapq.nlargest(_LONGEST, range(count), key=self.characters.__getitem__)
        return Statistics(
            rows=count,
            format=self.format,
            columns=dict(self.columns),
            characters=Spread.of(self.characters),
            turns=Spread.of([turns for turns in self.turns if turns]),
            roles=dict(self.roles.most_common()),
            conversations=self.held["conversations"],
            tools=self.held["tools"],
            images=self.held["images"],
            equal=self.held["equal"],
            asked=self.held["asked"],
            longest=tuple(
                Longest(row + 1, self.characters[row], None if sizes is None else sizes.of_row.get(row))
                for row in longest
            ),
            tokens=None if sizes is None else sizes.tokens(),
        )


def texts(passages: Iterable[Passage]) -> list[Any]:
    """Return what the passages of one row say, their shared prompt once."""
    found: list[Any] = []
    for passage in passages:
        if passage.prompt is not None and not any(passage.prompt == other for other in found[:1]):
            found.append(passage.prompt)
        if passage.completion is not None:
            found.append(passage.completion)
    return found


def length(part: Any) -> int:
    """Return the characters of a string, or of the texts of messages."""
    return len(part) if isinstance(part, str) else sum(len(content_text(message)) for message in part)


def _seen(hash: str, earlier: set[str]) -> bool:
    known = hash in earlier
    earlier.add(hash)
    return known
