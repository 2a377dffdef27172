"""Histograms as bars of text, for a terminal, and as SVG, for a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from posttrain_plugins.inspection.spread import Bin

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
_ROW, _BAR, _LABEL, _WIDTH = 18, 12, 110, 420
"""Pixels: the height of a line and of its bar, the room for labels, the width of it all."""


def text_bars(bins: Sequence[Bin], width: int = 32) -> list[str]:
    """Return one line for each bin: its label, a bar as long as its count, and the count."""
    most = max((each.count for each in bins), default=0) or 1
    label = max((len(each.label) for each in bins), default=0)
    return [
        f"{each.label:>{label}}  {_bar(each.count / most * width):<{width}}  {each.count}" for each in bins
    ]


def svg_bars(bins: Sequence[Bin], title: str) -> str:
    """Return a histogram as an inline SVG element that takes its colours from the page."""
    most = max((each.count for each in bins), default=0) or 1
    room = _WIDTH - _LABEL - 60
    rows = [_svg_row(each, i * _ROW, each.count / most * room) for i, each in enumerate(bins)]
    height = len(bins) * _ROW
    return (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(rows)}</svg>'
    )


def _bar(length: float) -> str:
    eighths = round(length * 8)
    if eighths == 0 and length > 0:
        eighths = 1
    return _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _svg_row(each: Bin, top: int, length: float) -> str:
    middle = top + _ROW - 5
    shown = max(length, 1.0) if each.count else 0.0
    return (
        f"<g><title>{escape(each.label)}: {each.count}</title>"
        f'<text x="{_LABEL - 8}" y="{middle}" text-anchor="end">{escape(each.label)}</text>'
        f'<rect x="{_LABEL}" y="{top + (_ROW - _BAR) // 2}" width="{shown:.1f}" height="{_BAR}" rx="2"/>'
        f'<text x="{_LABEL + shown + 6:.1f}" y="{middle}">{each.count}</text></g>'
    )
