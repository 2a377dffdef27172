"""The steps of an answer in free text, found by how the text is written.

An answer is cut, never changed: its steps in a row are the answer, but for white space between them. Nothing is cut
inside of code fences and displayed formulas.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

Style = Literal["latex", "named", "numbered", "paragraphs", "lines"]
"""`latex`: `\\item`s of a list. `named`: `Step 1:`. `numbered`: `1.`, `1)` or `(1)` at the beginning of a line.
`paragraphs`: parts with blank lines between them. `lines`: every line.
"""

_NUMBER = "[0-9]{1,4}"
_HEADING = r"[ \t#>*_-]*"
"""What Markdown may put before a heading or a list's entry."""
_NAMED_LINE = re.compile(rf"^{_HEADING}step[ \t]+({_NUMBER})\b(?!\.[0-9])", re.IGNORECASE | re.MULTILINE)
_NAMED_INLINE = re.compile(rf"(?<!\S)[*_]*step[ \t]+({_NUMBER})[ \t]*[:.)]", re.IGNORECASE)
_NUMBERED = re.compile(
    rf"^(?P<indent>[ \t]*)[*_]*(?:\(({_NUMBER})\)|({_NUMBER})[.)])(?=[*_]*\s)", re.MULTILINE
)
_GAP = re.compile(r"\n\s*")
_LIST = re.compile(r"(?<!\\)\\(?:(begin|end)\s*\{(?:enumerate|itemize|description)\*?\}|(item)(?![A-Za-z]))")
_FENCE = r"^[ \t]*```.*?(?:^[ \t]*```|\Z)"
_FORMULA = r"(?<!\\)\$\$.*?(?:\$\$|\Z)|(?<!\\)\\\[.*?(?:\\\]|\Z)"
_ENVIRONMENT = r"\\begin\{(?P<name>[a-z]+\*?)\}.*?(?:\\end\{(?P=name)\}|\Z)"
_CODE = re.compile(_FENCE, re.DOTALL | re.MULTILINE)
_WHOLE = re.compile(rf"{_FENCE}|{_FORMULA}|{_ENVIRONMENT}", re.DOTALL | re.MULTILINE)
"""What is not cut."""
_SENTENCE_ENDS = ".!?:;)]}$>*\"'"


def steps_of(text: str, style: Style | None = None) -> list[str]:
    """Return the steps of an answer, each without white space around it.

    What stands before the first marker belongs to the first step, as it is no step of its own. A paragraph behind the
    last one is a step: the conclusion. Numbers count up by one; others are part of the text, as are lists in lists.

    Args:
        text: The answer.
        style: How steps are told; None takes the first of `STYLES` that finds more than one.

    Returns:
        The steps; all of the text where there is but one, and none of a text without any character to see.
    """
    named = [style] if style is not None else list(STYLES)
    cuts = next((found for found in (STYLES[each](text) for each in named) if len(found) > 1), [])
    parts = (text[start:end].strip() for start, end in pairwise((0, *cuts[1:], len(text))))
    return [part for part in parts if part]


def style_of(text: str) -> Style | None:
    """Return the style that finds more than one step in an answer, or None."""
    return next((style for style, starts in STYLES.items() if len(starts(text)) > 1), None)


def _named(text: str) -> list[int]:
    """Headings first; where there are none, `Step 1: … Step 2: …` in running text, behind the end of a sentence."""
    skipped = _Skipped(_WHOLE, text)
    headings = list(skipped.matches(_NAMED_LINE))
    inline = (each for each in skipped.matches(_NAMED_INLINE) if _begins(text, each.start()))
    for markers in (headings, inline):
        found = _counting((int(each[1]), each.start()) for each in markers)
        if len(found) > 1:
            return _concluded(text, found, skipped)
    return []


def _begins(text: str, at: int) -> bool:
    """Whether a sentence may begin here."""
    before = text[max(0, at - 8) : at].rstrip(" \t")
    return not before or before[-1] in "\n" or before[-1] in _SENTENCE_ENDS


def _numbered(text: str) -> list[int]:
    skipped = _Skipped(_WHOLE, text)
    markers = [
        (len(each["indent"].expandtabs()), int(each[2] or each[3]), each.start())
        for each in skipped.matches(_NUMBERED)
    ]
    outer = min((indent for indent, _, _ in markers), default=0)
    found = _counting((number, start) for indent, number, start in markers if indent == outer)
    return _concluded(text, found, skipped) if len(found) > 1 else []


def _paragraphs(text: str) -> list[int]:
    return _between(text, line_breaks=2)


def _lines(text: str) -> list[int]:
    return _between(text, line_breaks=1)


def _latex(text: str) -> list[int]:
    """The entries of outer lists, and what stands between and behind lists."""
    skipped = _Skipped(_CODE, text)
    starts: list[int] = []
    depth = 0
    for each in skipped.matches(_LIST):
        depth = max(0, depth + {"begin": 1, "end": -1}.get(each[1], 0))
        if each[2] and depth == 1:
            starts.append(each.start())
        elif each[1] == "end" and depth == 0 and starts and text[each.end() :].strip():
            starts.append(each.end())
    return starts if len(starts) > 1 else []


STYLES: Mapping[Style, Callable[[str], list[int]]] = {
    "latex": _latex,
    "named": _named,
    "numbered": _numbered,
    "paragraphs": _paragraphs,
    "lines": _lines,
}
"""Where steps start in a text, by style, from the most telling to the least; the first one starts with the text."""


class _Skipped:
    """The parts of a text that are not looked into.

    Args:
        pattern: Finds them.
        text: The text.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._text = text
        self._spans = [match.span() for match in pattern.finditer(text)]
        self._starts = [start for start, _ in self._spans]

    def hides(self, at: int) -> bool:
        """Whether a place is inside of one."""
        before = bisect_right(self._starts, at) - 1
        return before >= 0 and at < self._spans[before][1]

    def matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield what a pattern finds outside of them."""
        return (match for match in pattern.finditer(self._text) if not self.hides(match.start()))


def _counting(markers: Iterator[tuple[int, int]]) -> list[int]:
    """Return where the markers stand that count up by one, from 0 or 1."""
    found: list[int] = []
    wanted = {0, 1}
    for number, start in markers:
        if number in wanted:
            found.append(start)
            wanted = {number + 1}
    return found


def _concluded(text: str, starts: Sequence[int], skipped: _Skipped) -> list[int]:
    """Add the first paragraph behind the last step's own, unless it is indented and so goes on with it."""
    for gap in skipped.matches(_GAP):
        if (
            gap.start() > starts[-1]
            and gap[0].count("\n") > 1
            and gap[0].endswith("\n")
            and gap.end() < len(text)
        ):
            return [*starts, gap.end()]
    return list(starts)


def _between(text: str, line_breaks: int) -> list[int]:
    """Return where the first character to see stands behind so many line breaks."""
    gaps = _Skipped(_WHOLE, text).matches(_GAP)
    first = len(text) - len(text.lstrip())
    behind = (gap.end() for gap in gaps if gap[0].count("\n") >= line_breaks)
    return [first, *(at for at in behind if first < at < len(text))]
