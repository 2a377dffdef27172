"""Times, counts and key figures as people read them."""

from __future__ import annotations

from collections.abc import Mapping

MOST_FIGURES = 4
"""A stage lists its most telling figures first; more than these do not fit into a line."""


def duration(seconds: float) -> str:
    """Return a time span."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def amount(number: int) -> str:
    """Return a large number in thousands, millions or billions."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)


def figures(values: Mapping[str, float]) -> str:
    """Return the first key figures in one line; no figure is broken over two lines."""
    return "  ".join(f"{name}={value:.4g}" for name, value in list(values.items())[:MOST_FIGURES])
