"""Did-you-mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar of `words`, or None when none is similar."""
    return next(iter(difflib.get_close_matches(word, sorted(set(words)), n=1, cutoff=0.6)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """Return `did you mean 'x'?`, or None when nothing is similar."""
    found = closest(word, words)
    return None if found is None else f"did you mean {found!r}?"
