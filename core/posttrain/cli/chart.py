"""Curves drawn with characters: one line of blocks, or a plot of Braille dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character: four rows of two dots."""
_BRAILLE = 0x2800


def sparkline(points: Mapping[int, float], width: int) -> str:
    """Return a curve in one line of at most `width` blocks, the lowest value the lowest block."""
    values = spread(points, min(width, len(points)))
    return "".join(BLOCKS[place] for place in _places(values, len(BLOCKS)))


def plot(points: Mapping[int, float], width: int, height: int) -> list[str]:
    """Return a curve as `height` lines with the largest and least value beside it, and one with first and last step.

    Args:
        points: Values by step.
        width: Characters of a line, the values beside the curve included.
        height: Lines of the curve.
    """
    labels = [f"{value:.4g}" for value in (max(points.values()), min(points.values()))]
    margin = max(map(len, labels)) + 1
    columns = 2 * max(1, width - margin)
    rows = _places(spread(points, columns), 4 * height)
    cells = [[_BRAILLE] * (columns // 2) for _ in range(height)]
    for column, row in enumerate(rows):
        # A line from the one before: a jump is drawn as well.
        before = rows[max(0, column - 1)]
        for each in range(min(before, row), max(before, row) + 1) if column else (row,):
            line = height - 1 - each // 4
            cells[line][column // 2] |= _DOTS[3 - each % 4][column % 2]
    left = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else labels[:1]
    drawn = [
        f"{label:>{margin - 1}} " + "".join(map(chr, line)) for label, line in zip(left, cells, strict=True)
    ]
    return [*drawn, " " * margin + _ends(min(points), max(points), columns // 2)]


def _ends(first: int, last: int, width: int) -> str:
    """Return the first and the last step below the ends of a curve; the first alone where both do not fit."""
    gap = width - len(f"{first}{last}")
    return f"{first}{' ' * gap}{last}" if first != last and gap > 0 else str(first)


def spread(points: Mapping[int, float], columns: int) -> list[float]:
    """Return a value for each of some columns: the mean of its steps, and a straight line where it has none."""
    steps = sorted(points)
    span = max(1, steps[-1] - steps[0])
    gathered: dict[int, list[float]] = {}
    for step in steps:
        gathered.setdefault(round((step - steps[0]) / span * (columns - 1)), []).append(points[step])
    known = {column: sum(values) / len(values) for column, values in gathered.items()}
    return [_between(known, column) for column in range(columns)]


def _between(known: Mapping[int, float], column: int) -> float:
    left = max((each for each in known if each <= column), default=min(known))
    right = min((each for each in known if each >= column), default=max(known))
    if left == right:
        return known[left]
    share = (column - left) / (right - left)
    return known[left] * (1 - share) + known[right] * share


def _places(values: Sequence[float], count: int) -> list[int]:
    """Return the place of each value on a scale of `count` places; in the middle where all are the same."""
    least, most = min(values), max(values)
    if least == most:
        return [(count - 1) // 2] * len(values)
    return [min(count - 1, int((value - least) / (most - least) * count)) for value in values]
