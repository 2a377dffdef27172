"""Text from data, made safe to look at: nothing in it may act on a terminal or hide from the eye."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

_NAMES = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC "
    "FS GS RS US"
)
_CONTROLS = tuple(_NAMES.split(" "))
"""What people call the control characters below the space, in their order."""
_JOINERS = "\u200c\u200d"
"""They join what stands around them, in Persian words and in emoji; alone they do nothing."""
_BREAKS = "\n\t"


def visible(text: str) -> str:
    """Return a text in which every character that acts or hides is replaced by a visible name.

    Line breaks and tabs stay. Control characters, escape sequences and carriage returns are named (`⟨ESC⟩`);
    directional overrides, invisible format characters, line separators, lone surrogates, private and unassigned
    characters become `⟨U+202E⟩`.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """Split `visible(text)` into runs, each with whether it stands for characters that cannot be shown."""
    run: list[str] = []
    hidden = False
    for character in text:
        acts = _acts(character)
        if run and acts is not hidden:
            yield "".join(run), hidden
            run = []
        hidden = acts
        run.append(_shown(character))
    if run:
        yield "".join(run), hidden


def one_line(text: str, longest: int = 200) -> str:
    """Return a visible text on one line, cut where it is longer than `longest` characters."""
    shown = visible(text[: longest + 1]).replace("\n", "↵").replace("\t", "⇥")
    return shown if len(text) <= longest else f"{shown[:longest]}…"


def _acts(character: str) -> bool:
    if character.isprintable() or character in _BREAKS or character in _JOINERS:
        return False
    return unicodedata.category(character) != "Zs"


def _shown(character: str) -> str:
    if not _acts(character):
        return character
    point = ord(character)
    return f"⟨{_CONTROLS[point]}⟩" if point < len(_CONTROLS) else f"⟨U+{point:04X}⟩"
