"""Comparing what a template's author marked as the assistant's with what was found by tracing.

Authors mark what they see fit: headers that the generation prompt supplies, newlines behind the end of turn. What is
supervised never follows the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain_plugins.templates.reading import Note, Span, Turn
from posttrain_plugins.templates.tracing import Trace


def differences(trace: Trace, turns: Sequence[Turn]) -> list[Note]:
    """Return a note for each turn that `{% generation %}` marks otherwise; none for a template without marks."""
    if not trace.marked:
        return []
    notes = []
    for turn in turns:
        touching = [
            mark for mark in trace.marked if mark.start < turn.span.end and turn.span.start < mark.end
        ]
        if not touching:
            notes.append(Note("markers-differ", "the template's own marks leave the turn out", turn.message))
            continue
        marked = Span(min(mark.start for mark in touching), max(mark.end for mark in touching))
        found = [
            *_edge(trace, "begin", marked.start, turn.span.start),
            *_edge(trace, "end", marked.end, turn.span.end),
        ]
        if found:
            notes.append(
                Note("markers-differ", f"the template's own marks {' and '.join(found)}", turn.message)
            )
    return notes


def _edge(trace: Trace, verb: str, marked: int, found: int) -> Iterator[str]:
    """Say how an edge of the marks differs; text is quoted where it is the template's own."""
    if marked == found:
        return
    first, last = sorted((marked, found))
    side = "before" if marked < found else "after"
    literal = all(run.message is None for run in trace.runs if run.start < last and first < run.end)
    between = repr(trace.text[first:last]) if literal else "text of the conversation"
    yield f"{verb} {side} the turn does ({between})"
