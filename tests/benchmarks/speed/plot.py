"""A bar for each race, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from comparison import Row
from objectives import OBJECTIVES

WIDTH, LEFT, BAR, GAP = 760, 230, 14, 6
COLOURS = {
    "sft": "#2f6f9f",
    "dpo": "#c2703d",
    "kto": "#3d8f5f",
    "orpo": "#7a5fa8",
    "cpo": "#a8873a",
    "reward": "#a04a5e",
}


def ratios(every: Sequence[Row]) -> str:
    """Draw how many times faster than TRL's best each race was; a tick is what was wanted. Logarithmic."""
    most = max([8.0, *(row.ratio for row in every)]) * 1.25
    least = min([0.5, *(row.ratio for row in every)])
    scale = (WIDTH - LEFT - 60) / math.log(most / least)

    def place(ratio: float) -> float:
        return LEFT + scale * math.log(ratio / least)

    height = 40 + len(every) * (BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for tick in (1, 2, 4, 8, 16, 32):
        if tick < most:
            x = place(tick)
            parts.append(f'<path d="M{x:.1f} 20V{height - 10}" stroke="#cccccc"/>')
            parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle" fill="#444444">{tick}×</text>')
    for number, row in enumerate(every):
        parts += _bar(row, 26 + number * (BAR + GAP), place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, y: float, place: object) -> list[str]:
    assert callable(place)
    start, end = sorted((place(1.0), place(row.ratio)))
    wanted = place(row.scenario.ratio(row.objective))
    name = f"{row.scenario.name}, {OBJECTIVES[row.objective].title}"
    return [
        f'<text x="{LEFT - 12}" y="{y + BAR - 3}" text-anchor="end" fill="#222222">{name}</text>',
        f'<rect x="{start:.1f}" y="{y}" width="{end - start:.1f}" height="{BAR}" fill="{COLOURS[row.objective]}"/>',
        f'<path d="M{wanted:.1f} {y - 2}v{BAR + 4}" stroke="#222222" stroke-width="2"/>',
        f'<text x="{end + 8:.1f}" y="{y + BAR - 3}" fill="#222222">{row.ratio:.1f}×</text>',
    ]
