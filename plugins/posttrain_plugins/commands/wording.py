"""Errors of stages, said to somebody at a command line: options of a pipeline file become those of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.errors import PosttrainError

_FORMAT = re.compile(r"`format: ([\w/.-]+)`")
_COLUMNS = re.compile(r"`columns: \{([^}`]*)\}`")


def worded(text: str) -> str:
    """Return a text whose `format: NAME` and `columns: {OLD: NEW}` are options of a command."""
    return _COLUMNS.sub(_renamed, _FORMAT.sub(r"`--format \1`", text))


@contextmanager
def spoken() -> Iterator[None]:
    """Word the errors of the block for a command line."""
    try:
        yield
    except PosttrainError as error:
        error.message = worded(error.message)
        error.found = None if error.found is None else worded(error.found)
        error.fix = None if error.fix is None else worded(error.fix)
        raise


def _renamed(match: re.Match[str]) -> str:
    pairs = (pair.split(":", 1) for pair in match[1].split(",") if ":" in pair)
    return "`" + " ".join(f"--columns {old.strip()}={new.strip()}" for old, new in pairs) + "`"
