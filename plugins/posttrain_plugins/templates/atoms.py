"""Atomic tokens of rendered conversations, of which some end turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from posttrain_plugins.templates.tracing import Trace


class Atom(NamedTuple):
    """A token that the tokenizer never makes by merging; `closing` tells one that may end a turn.

    Tags such as `</tool_call>` are part of an answer: they end no turn unless they are special tokens.
    """

    start: int
    end: int
    closing: bool


Atoms = Callable[[str], Sequence[Atom]]
"""Finds the atomic tokens of a text; blank ones are left out."""


def literal(atoms: Sequence[Atom], trace: Trace) -> list[Atom]:
    """Return the atoms that the template itself writes; they may take blanks of others with them."""
    found = []
    for atom in atoms:
        text = trace.text[atom.start : atom.end]
        start = atom.start + len(text) - len(text.lstrip())
        end = start + len(text.strip())
        if all(run.message is None for run in trace.runs if run.start < end and start < run.end):
            found.append(atom)
    return found
