"""Moulds: what conversations of one structure render to, so that most rows need no traced render.

Rows of one structure (the same roles and fields, the same tools, content of the same kind) render to the same literal
text around their own strings. What a mould makes of a row's strings must equal the row's plain render to the
character; a row for which it does not is traced itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.provenance import Recipe, cuts, made
from posttrain_plugins.templates.reading import Note, Reading, Span, Turn, apart

CAPACITY = 512
"""How many structures are remembered."""


class Change(Enum):
    """What the cuts of a recipe take from a string: nothing, blanks from its edges, or more than that."""

    NONE = "none"
    EDGES = "edges"
    WORDS = "words"


def change(recipe: Recipe, text: str) -> Change:
    """Return what the cuts of a recipe take from a string.

    Raises:
        IndexError: A step has fewer results for this text.
    """
    left = made(cuts(recipe), text)
    if left == text:
        return Change.NONE
    return Change.EDGES if left.strip() == text.strip() else Change.WORDS


def string_at(message: Mapping[str, Any], path: Sequence[str | int]) -> str:
    """Return the string of a message that a path leads to."""
    value: Any = message
    for key in path:
        value = value[key]
    return str(value)


@dataclass(frozen=True)
class Point:
    """A place in the literal text: `offset` characters into the literal before slot `literal`."""

    literal: int
    offset: int


@dataclass(frozen=True)
class Slot:
    """A string of the conversation.

    Args:
        message: Index of the message.
        path: Where the string is in the message.
        recipe: What becomes of it.
        role: Whose message it is.
        change: How much of it the recipe's cuts take away, which decides about notes.
    """

    message: int
    path: tuple[str | int, ...]
    recipe: Recipe
    role: Any
    change: Change


@dataclass(frozen=True)
class Mould:
    """What conversations of one structure render to.

    Args:
        literals: The template's own text: before, between and behind the slots.
        slots: Where strings of the conversation go.
        turns: The learned turns, with their span and own text as points.
        controls: Control tokens that stand in the literals and yet come from the conversation.
        guards: Places where the text must not begin with a string, lest a turn begin further on.
        closing: What the text goes on with behind a place, where the template leaves the last turn open.
        notes: What was lost.
    """

    literals: tuple[str, ...]
    slots: tuple[Slot, ...]
    turns: tuple[tuple[Turn, tuple[Point, Point], tuple[tuple[Point, Point], ...]], ...]
    controls: tuple[tuple[Point, Point], ...]
    guards: tuple[tuple[Point, str], ...]
    closing: tuple[Point, str] | None
    notes: tuple[Note, ...]

    def reading(self, messages: Sequence[Mapping[str, Any]], text: str, controls: Controls) -> Reading | None:
        """Return how a conversation of this structure reads, or None when it does not fit.

        Args:
            messages: The messages as the template is given them.
            text: Their plain render.
            controls: The control tokens.
        """
        values = self._values(messages)
        if values is None:
            return None
        starts, at, woven = [0], 0, [self.literals[0]]
        for literal, value in zip(self.literals, values, strict=False):
            at += len(literal) + len(value)
            starts.append(at)
        for value, literal in zip(values, self.literals[1:], strict=True):
            woven += (value, literal)
        if "".join(woven) != text:
            return None
        if any(
            text.startswith(string, starts[point.literal] + point.offset) for point, string in self.guards
        ):
            return None
        return self._read(text, values, starts, controls)

    def _values(self, messages: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Return what goes into the slots, or None where a slot is empty or its string is changed in another way."""
        values = []
        for slot in self.slots:
            value = string_at(messages[slot.message], slot.path)
            if slot.recipe:
                try:
                    if change(slot.recipe, value) is not slot.change:
                        return None
                    value = made(slot.recipe, value)
                except IndexError:
                    return None
            if not value:
                return None
            values.append(value)
        return values

    def _read(self, text: str, values: Sequence[str], starts: Sequence[int], controls: Controls) -> Reading:
        def span(points: tuple[Point, Point]) -> Span:
            first, last = points
            return Span(starts[first.literal] + first.offset, starts[last.literal] + last.offset)

        turns = tuple(
            Turn(turn.message, span(whole), tuple(map(span, own)), turn.end_of_turn, turn.notes)
            for turn, whole, own in self.turns
        )
        spelled = [*map(span, self.controls)]
        for slot, value, start, literal in zip(self.slots, values, starts, self.literals, strict=False):
            found = controls.of(slot.role).spans(value)
            first = start + len(literal)
            spelled += [Span(first + one.start, first + one.end) for one in found]
        if self.closing is not None:
            place, more = self.closing
            text = text[: starts[place.literal] + place.offset] + more
        return Reading(text, apart(turn.span for turn in turns), turns, tuple(sorted(spelled)), self.notes)


class Moulds:
    """The moulds of one template, by structure; those used longest ago are forgotten.

    A structure without a mould is remembered too: each of its rows is traced.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._moulds: OrderedDict[Hashable, Mould | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._moulds)

    def __contains__(self, structure: Hashable) -> bool:
        return structure in self._moulds

    def get(self, structure: Hashable) -> Mould | None:
        """Return the mould of a structure, or None."""
        if structure not in self._moulds:
            return None
        self._moulds.move_to_end(structure)
        return self._moulds[structure]

    def keep(self, structure: Hashable, mould: Mould | None) -> None:
        """Remember the mould of a structure."""
        self._moulds[structure] = mould
        if len(self._moulds) > self._capacity:
            self._moulds.popitem(last=False)
