"""How names, sizes and values are put into words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

_LONGEST = 80


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `word` probably means, None when none is similar."""
    return next(iter(difflib.get_close_matches(word, sorted(set(known)), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the fix for an unknown name, if one of `known` is close to it."""
    match = nearest(word, known)
    return None if match is None else f"did you mean `{match}`?"


def listed(names: Iterable[str]) -> str:
    """Return names for an `expected:` line."""
    return ", ".join(names) or "none"


def either(names: Iterable[str]) -> str:
    """Return names any one of which would do, in alphabetical order."""
    return " or ".join(sorted(names))


def indefinite(noun: str) -> str:
    """Return a noun behind its article: `a model`, `an adapter`."""
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"


def size(count: int) -> str:
    """Return a number of bytes."""
    if count < 1024:
        return f"{count} B"
    value, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.1f} {unit}"


def short(value: Any) -> str:
    """Return a value as it would stand in a file, cut to one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
