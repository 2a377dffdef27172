"""JSON as files hold it: strict, with positions that people can find."""

from __future__ import annotations

import json
from typing import Any

_NAMES = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_not_json)
"""Refuses NaN and infinities."""


def json_type(value: Any) -> str:
    """Return the JSON type of a value with its article."""
    return _NAMES.get(type(value), "a number")


def told(error: ValueError | RecursionError, text: str) -> str:
    """Say what is wrong with a text that is no JSON, and at which character of its line."""
    if isinstance(error, RecursionError):
        return "invalid JSON: values are nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error}"
    found = text[error.pos : error.pos + 1]
    seen = "" if found.isprintable() else f" (found {found!a})"
    return f"invalid JSON: {error.msg} at column {error.colno}{seen}"
