"""What a word of a command line is as the value of an option."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from posttrain.contracts.component import Choice, Config
from posttrain.contracts.stage import SourceMark
from posttrain.errors import SpecError
from posttrain.planning.source import read
from posttrain.planning.tree import resolve_plain
from posttrain.registry.fields import marks_of

_ESCAPE = re.compile(r"\\([ntr\\])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
"""What stands for characters that are hard to type, as between double quotes in YAML and JSON."""


def leaf_at(model: type[Config], path: Sequence[str]) -> FieldInfo | None:
    """Return the option at a path; None where only its component knows."""
    holder: type[Config] | None = model
    field: FieldInfo | None = None
    for part in path:
        if holder is None or part not in holder.model_fields:
            return None
        field = holder.model_fields[part]
        holder = _nested(field.annotation)
    return field


def arms_of(annotation: Any) -> Iterator[Any]:
    """Yield what a type may be, without marks and None."""
    if get_origin(annotation) is Annotated:
        yield from arms_of(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from arms_of(arm)
    elif hasattr(annotation, "__value__"):
        yield from arms_of(annotation.__value__)
    elif annotation is not type(None):
        yield annotation


def is_text(field: FieldInfo | None) -> bool:
    """Whether an option is text of any kind, and names no file."""
    if field is None or list(arms_of(field.annotation)) != [str]:
        return False
    return not any(isinstance(mark, SourceMark) for mark in (*field.metadata, *marks_of(field.annotation)))


def unescaped(text: str) -> str:
    r"""Return text with the characters that `\n`, `\t`, `\r` and `\\` stand for: a shell passes them on as they are."""
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def value_of(text: str, arms: Sequence[Any], where: str) -> Any:
    """Read a value: as it stands where only text will do, else as in a pipeline file."""
    if text[:1] in ("{", "[") and not (arms and all(arm is str for arm in arms)):
        return read(text, where).data
    if arms and all(map(_textual, arms)):
        return text
    try:
        return resolve_plain(text)
    except ValueError as error:
        raise SpecError(f"this value is {error}", where=where, expected="a finite number") from error


def _textual(arm: Any) -> bool:
    if get_origin(arm) is Literal:
        return all(isinstance(each, str) for each in get_args(arm))
    return arm is str or (isinstance(arm, type) and issubclass(arm, Choice | Enum))


def _nested(annotation: Any) -> type[Config] | None:
    models = [arm for arm in arms_of(annotation) if isinstance(arm, type) and issubclass(arm, Config)]
    return models[0] if len(models) == 1 else None
