"""Atomic tokens of rendered conversations, of which some end turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from posttrain_plugins.templates.reading import Span
from posttrain_plugins.templates.tracing import Trace


class Atom(NamedTuple):
    """A token that the tokenizer never makes by merging; `closing` tells one that may end a turn.

    Tags such as `</tool_call>` are part of an answer: they end no turn unless they are special tokens. Some tokens take
    blanks around them with them: these lie between `start` and `end`, and not in `core`.
    """

    start: int
    end: int
    closing: bool
    core: Span


Atoms = Callable[[str], Sequence[Atom]]
"""Finds the atomic tokens of a text; blank ones are left out."""


def literal(atoms: Sequence[Atom], trace: Trace) -> list[Atom]:
    """Return the atoms that the template itself writes; they may take blanks of others with them."""
    return [
        atom
        for atom in atoms
        if all(
            run.message is None
            for run in trace.runs
            if run.start < atom.core.end and atom.core.start < run.end
        )
    ]


def outside_tags(text: str, start: int, stop: int) -> int:
    """Return `stop`, or where the tag from `start` on begins that it would cut in two.

    Tags need be no tokens: two that begin alike, as `<think>` and `<tool_call>` do, still have nothing in common.
    """
    for opening, closing in (("<", ">"), ("[", "]")):
        opened = text.rfind(opening, start, stop)
        if opened >= 0 and closing not in text[opened:stop]:
            return opened
    return stop
