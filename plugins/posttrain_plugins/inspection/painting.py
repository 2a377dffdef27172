"""Token sequences as styled text of a terminal; without colours, as text with marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.text import Text

from posttrain_plugins.inspection.escaping import parts
from posttrain_plugins.inspection.views import Look, Piece, folded

STYLES: Mapping[Look, str] = {
    Look.GIVEN: "dim",
    Look.LEARNED: "bold green",
    Look.STRADDLING: "black on yellow",
    Look.LOOSE: "dim italic",
    Look.CUT: "red strike",
}
MARKS: Mapping[Look, tuple[str, str]] = {
    Look.GIVEN: ("", ""),
    Look.LEARNED: ("⟦", "⟧"),
    Look.STRADDLING: ("⟪", "⟫"),
    Look.LOOSE: ("", ""),
    Look.CUT: ("⟨cut: ", "⟩"),
}
"""What goes around tokens where there are no colours."""
_HIDDEN = "magenta"
"""The style of what stands for a character that cannot be shown."""
_CHIP = "reverse"
_EDGE = "│"
UNKNOWN = "¿"
"""What stands behind a token that the tokenizer does not know, where the ends of tokens are shown."""
_REST = "·"
"""A token without characters of its own: the later part of a character."""


def paint(pieces: Sequence[Piece], *, tokens: bool = False, marks: bool = False) -> Text:
    """Return a sequence as text whose learned tokens stand out.

    Args:
        pieces: The sequence.
        tokens: Whether to show where tokens end.
        marks: Whether to put signs around what stands out, for where there are no colours.
    """
    painted = Text(overflow="fold")
    for look, run in groupby(pieces if tokens else folded(pieces), attrgetter("look")):
        before, after = MARKS[look] if marks else ("", "")
        painted.append(before)
        for piece in run:
            _append(painted, piece, tokens)
        painted.append(after)
    return painted


def safe(text: str, style: str = "") -> Text:
    """Return a text of the data in one style, with what cannot be shown made visible."""
    painted = Text(overflow="fold")
    for shown, hidden in parts(text):
        painted.append(shown, _HIDDEN if hidden else style)
    return painted


def _append(painted: Text, piece: Piece, tokens: bool) -> None:
    """Add a token; line breaks of what stands out get a sign, as they have no colour of their own."""
    style = f"{STYLES[piece.look]} {_CHIP}" if piece.special else STYLES[piece.look]
    returns = tokens or piece.look is not Look.GIVEN
    for shown, hidden in parts(piece.shown or (_REST if tokens else "")):
        painted.append(shown.replace("\n", "↵\n") if returns else shown, _HIDDEN if hidden else style)
    if tokens and piece.unknown:
        painted.append(UNKNOWN, "bold red")
    if tokens:
        painted.append(_EDGE, "blue")
