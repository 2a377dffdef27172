"""Errors of stages, said to somebody at a command line: options of a pipeline file become those of a command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError, SpecError
from posttrain_plugins.commands.spelling import flow

_FORMAT = re.compile(r"`format: ([\w/.-]+)`")
_COLUMNS = re.compile(r"`columns: \{([^}`]*)\}`")
_OPTION = re.compile(r"`(\w+: [^`]+)`")
_SPECIAL = re.compile(r"[\s{}\[\]*?$&;|<>()#'\"]")


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


def flagged(text: str, named: Callable[[str], Flag | None] | None = None) -> str:
    """Return a text whose options in backticks, such as `lora: {r: 16}`, are written as `--lora.r 16`.

    Args:
        text: The text.
        named: Tells what the command calls an option, None for what is none of it; all are called as they are when
            left out.
    """
    return _OPTION.sub(lambda match: _flags(match[1], named or Flag) or match[0], text)


@dataclass(frozen=True)
class Flag:
    """An option of a command.

    Args:
        name: What it is called, without its dashes.
        whole: Its value is one mapping with keys of any kind.
    """

    name: str
    whole: bool = False


def _flags(option: str, named: Callable[[str], Flag | None]) -> str | None:
    """Return options as a command line spells them; None where one is unknown."""
    from posttrain.planning.source import read

    try:
        found = read(option, "an option").data
    except SpecError:
        return None
    words: list[str] = []
    for name, value in found.items() if isinstance(found, Mapping) else ():
        flag = named(str(name))
        if flag is None:
            return None
        words += [f"--{flag.name} {_quoted(flow(value))}"] if flag.whole else _spelled(flag.name, value)
    return f"`{' '.join(words)}`" if words else None


def _spelled(name: str, value: Any) -> Iterator[str]:
    """Yield an option and its value as words of a command line; a component's name stands before its options."""
    if value is True:
        yield f"--{name}"
    elif not isinstance(value, Mapping) or not value:
        values = value if isinstance(value, list) else [value]
        yield " ".join([f"--{name}", *(_quoted(flow(each)) for each in values)])
    else:
        for key, inner in value.items():
            yield from _spelled(name if key == "name" else f"{name}.{key}", inner)


def _quoted(word: str) -> str:
    return f"'{word}'" if _SPECIAL.search(word) else word


def _renamed(match: re.Match[str]) -> str:
    pairs = (pair.split(":", 1) for pair in match[1].split(",") if ":" in pair)
    return "`" + " ".join(f"--columns {old.strip()}={new.strip()}" for old, new in pairs) + "`"
