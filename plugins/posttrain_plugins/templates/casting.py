"""Making readings and moulds of what was found out about one traced conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.moulds import Mould, Point, Slot, change, string_at
from posttrain_plugins.templates.provenance import TOOLS, Piece, Source
from posttrain_plugins.templates.reading import Note, Reading, Span, Turn, apart
from posttrain_plugins.templates.tracing import Run, Trace
from posttrain_plugins.templates.turns import Closing, Start

Messages = Sequence[Mapping[str, Any]]
PARTS = 16
"""How many parts of one string a mould makes; each takes a look at all of the string."""


@dataclass(frozen=True)
class Finding:
    """What was found out about one conversation.

    Args:
        messages: The messages as the template was given them.
        trace: Their traced render.
        turns: The learned turns.
        starts: How each of them begins.
        closing: What closes the last one, when the template leaves it open.
        notes: What was lost.
    """

    messages: Messages
    trace: Trace
    turns: Sequence[Turn] = ()
    starts: Sequence[Start] = ()
    closing: Closing | None = None
    notes: tuple[Note, ...] = ()

    def reading(self, controls: Controls) -> Reading:
        """Return how the conversation reads."""
        text = self.trace.text
        if self.closing is not None:
            text = text[: self.closing.upto] + self.closing.text
        spelled = sorted(span for _, span in self.spelled(controls))
        return Reading(
            text, apart(turn.span for turn in self.turns), tuple(self.turns), tuple(spelled), self.notes
        )

    def spelled(self, controls: Controls) -> Iterator[tuple[Run, Span]]:
        """Yield the control tokens that messages and tools spell, with the run each is in."""
        for run in self.trace.runs:
            if run.message is not None:
                role = None if run.message == TOOLS else self.messages[run.message].get("role")
                for found in controls.of(role).spans(self.trace.text[run.start : run.end]):
                    yield run, Span(run.start + found.start, run.start + found.end)

    def mould(self, controls: Controls) -> Mould | None:
        """Return the mould of the conversation, or None when its text cannot be made from its strings."""
        try:
            mould = _Caster(self).mould(controls)
        except _NoMouldError:
            return None
        return (
            mould
            if mould.reading(self.messages, self.trace.text, controls) == self.reading(controls)
            else None
        )


class _NoMouldError(Exception):
    """Something in the text is neither literal nor made from a string as a whole."""


@dataclass
class _Caster:
    """Takes a text apart into literals and slots."""

    finding: Finding
    literals: list[str] = field(default_factory=lambda: [""])
    slots: list[Slot] = field(default_factory=list)
    edges: list[Span] = field(default_factory=list)
    parts: Counter[Source | None] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        trace = self.finding.trace
        for run in trace.runs:
            if _is_literal(run.piece):
                self.literals[-1] += trace.text[run.start : run.end]
            else:
                self.slots.append(self._slot(run.piece))
                self.edges.append(Span(run.start, run.end))
                self.literals.append("")

    def mould(self, controls: Controls) -> Mould:
        finding = self.finding
        literal = [span for run, span in finding.spelled(controls) if _is_literal(run.piece)]
        turns = tuple(
            (turn, self.points(turn.span), tuple(map(self.points, turn.own))) for turn in finding.turns
        )
        closing = finding.closing
        return Mould(
            tuple(self.literals),
            tuple(self.slots),
            turns,
            tuple(map(self.points, literal)),
            tuple(guard for start in finding.starts for guard in self._guards(start)),
            None if closing is None else (self.point(closing.upto), closing.text),
            finding.notes,
        )

    def points(self, span: Span) -> tuple[Point, Point]:
        return self.point(span.start), self.point(span.end)

    def point(self, place: int) -> Point:
        """Return where a place of the text is in the literals.

        Raises:
            _NoMouldError: It is inside of a slot, so it would be elsewhere in other rows.
        """
        closing = self.finding.closing
        if closing is not None and place > closing.upto:
            upto = self.point(closing.upto)
            return Point(upto.literal, upto.offset + place - closing.upto)
        start = 0
        for number, edge in enumerate(self.edges):
            if place <= edge.start:
                return Point(number, place - start)
            if place < edge.end:
                raise _NoMouldError
            start = edge.end
        return Point(len(self.edges), place - start)

    def _slot(self, piece: Piece) -> Slot:
        source = piece.source
        self.parts[source] += 1
        if source is None or piece.recipe is None or self.parts[source] > PARTS:
            raise _NoMouldError
        message = self.finding.messages[source.message]
        changed = change(piece.recipe, string_at(message, source.path))
        return Slot(source.message, source.path, piece.recipe, message.get("role"), changed)

    def _guards(self, start: Start) -> Iterator[tuple[Point, str]]:
        """Yield where other rows must differ from the generation prompt, as this row does.

        Raises:
            _NoMouldError: This row's own words are some of the generation prompt's; those of others are not.
        """
        if start.own:
            raise _NoMouldError
        if not start.missing:
            return
        point = self.point(start.reach)
        if any(edge.start == start.reach for edge in self.edges):
            yield point, start.missing[start.reach - start.at :][:1]


def _is_literal(piece: Piece) -> bool:
    """Whether a piece is the same in every row of a structure: keys and tools belong to the structure."""
    return piece.source is None or piece.source.key or piece.source.message == TOOLS
