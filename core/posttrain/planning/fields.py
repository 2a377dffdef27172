"""Checks of the spec's fields that a type alone cannot express. Each collects every problem of its field."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from posttrain.errors import SpecError
from posttrain.keypath import KeyPath
from posttrain.planning.problems import refusal, shown
from posttrain.planning.references import NAME, Ref, scalar_text
from posttrain.planning.secrets import looks_like_secret

Problems = list[tuple[KeyPath, SpecError]]

_NAME = re.compile(NAME)
_NOT_IN_A_NAME = re.compile(r"[\[\],=\x00-\x1f\x7f]|^\s|\s$|^$")


def plain_data(value: Any) -> Any:
    """Return `value` as JSON-like data (tuples become lists); refuse other objects and literal secrets."""
    problems: Problems = []
    data = _plain(value, (), problems)
    if problems:
        raise refusal(problems)
    return data


def _plain(value: Any, path: KeyPath, problems: Problems) -> Any:
    if isinstance(value, dict):
        return {
            _text_key(key, path, problems): _plain(item, (*path, key), problems)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), problems) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(
            (path, SpecError("this number is not finite", found=value, expected="a finite number"))
        )
    elif value is not None and type(value) not in (str, int, float, bool):
        found = f"an object of type {type(value).__name__}"
        problems.append(
            (path, SpecError("this is no plain value", found=found, expected="text, number, list, mapping"))
        )
    elif looks_like_secret(next((part for part in reversed(path) if isinstance(part, str)), ""), value):
        problems.append((path, literal_secret()))
    return value


def _text_key(key: Any, path: KeyPath, problems: Problems) -> Any:
    if not isinstance(key, str):
        problems.append((path, SpecError("this key is no text", found=key, expected="text")))
    return key


def literal_secret() -> SpecError:
    """Return the error for a secret that is written out. It does not repeat the secret."""
    return SpecError(
        "this looks like a secret; a pipeline only names secrets",
        found="a value (not shown)",
        expected="env:NAME",
        fix="put it in an environment variable and write env:NAME",
    )


def input_references(value: Any) -> Any:
    """Check `inputs`: port names, and one reference or a list of them for each."""
    if not isinstance(value, dict):
        return value
    problems: Problems = []
    for port, given in value.items():
        if not isinstance(port, str) or not _NAME.fullmatch(port):
            problems.append(
                ((port,), SpecError("this is no name of a port", found=port, expected="a name such as model"))
            )
        many = isinstance(given, list | tuple)
        if many and not given:
            problems.append(((port,), SpecError("this input is connected to nothing", fix="remove it")))
        for index, text in enumerate(given if many else [given]):
            _reference(text, (port, index) if many else (port,), problems)
    if problems:
        raise refusal(problems)
    return {port: list(given) if isinstance(given, tuple) else given for port, given in value.items()}


def _reference(text: Any, path: KeyPath, problems: Problems) -> None:
    if not isinstance(text, str):
        expected = "STAGE or STAGE.PORT, or a list of them"
        problems.append((path, SpecError("this is no reference", found=shown(path, text), expected=expected)))
        return
    try:
        Ref.parse(text)
    except SpecError as error:
        problems.append((path, error))


def axes(value: Any) -> Any:
    """Check `matrix`: key paths into `with`, and for each a list of different scalars."""
    if not isinstance(value, dict):
        return value
    problems: Problems = []
    for axis, values in value.items():
        if not isinstance(axis, str) or not all(
            part and not _NOT_IN_A_NAME.search(part) for part in axis.split(".")
        ):
            problem = SpecError(
                "this is no option of the stage", found=axis, expected="a key path in `with`: loss.beta"
            )
            problems.append(((axis,), problem))
        elif not isinstance(values, list | tuple) or not values:
            problem = SpecError(
                "an axis of a matrix takes the list of its values",
                found=shown((), values),
                expected="[VALUE, …]",
            )
            problems.append(((axis,), problem))
        else:
            _axis(axis, values, problems)
    if problems:
        raise refusal(problems)
    return {axis: list(values) for axis, values in value.items()}


def _axis(axis: str, values: Any, problems: Problems) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        problem = _axis_problem(axis, value, seen)
        if problem is not None:
            problems.append(((axis, index), problem))
        else:
            seen.add(scalar_text(value))


def _axis_problem(axis: str, value: Any, seen: set[str]) -> SpecError | None:
    if looks_like_secret(axis.rpartition(".")[2], value):
        return literal_secret()
    if value is not None and type(value) not in (str, int, float, bool):
        return SpecError(
            "a value of a matrix is a scalar", found=shown((), value), expected="text or a number"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return SpecError("this number is not finite", found=value, expected="a finite number")
    if isinstance(value, str) and _NOT_IN_A_NAME.search(value):
        return SpecError(
            "this text cannot be part of a node's name",
            found=repr(value),
            expected="text without brackets, commas, equal signs, line breaks or outer spaces",
        )
    if scalar_text(value) in seen:
        return SpecError(
            "this value is in the list twice", found=scalar_text(value), fix="remove one of them"
        )
    return None


def unbroken(value: Any) -> Any:
    """Refuse control characters and halves of surrogate pairs: no file has such a name."""
    if isinstance(value, str) and any(unicodedata.category(each) in ("Cc", "Cs") for each in value):
        problem = SpecError(
            "this cannot be the name of a file",
            found=ascii(value),
            expected="text without control characters",
        )
        raise refusal([((), problem)])
    return value


def without_nul(value: Any) -> Any:
    """Refuse values that cannot be handed to a process."""
    texts = value.items() if isinstance(value, dict) else ()
    problem = SpecError("this holds a NUL character", fix="remove it: no environment variable can hold one")
    problems: Problems = [
        ((name,), problem) for name, text in texts if isinstance(text, str) and "\0" in text
    ]
    if problems:
        raise refusal(problems)
    return value


def distinct(value: Any) -> Any:
    """Refuse a list that names something twice."""
    if not isinstance(value, list | tuple):
        return value
    items = list(value)
    problems: Problems = [
        ((index,), SpecError(f"`{item}` is in the list twice", fix="remove one of them"))
        for index, item in enumerate(items)
        if item in items[:index]
    ]
    if problems:
        raise refusal(problems)
    return items
