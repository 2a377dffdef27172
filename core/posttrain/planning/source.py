"""A pipeline file as plain data in which every value knows its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import SpecError
from posttrain.keypath import KeyPath
from posttrain.planning.secrets import Redactor
from posttrain.planning.tree import Pair, Position, Value, build

__all__ = ["KeyPath", "Places", "Position", "Source", "dotted", "load", "problem_at", "read"]

MAX_BYTES = 1_000_000


class Places(Protocol):
    """Anything that knows where the value at a key path was written."""

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Return the place of the value at `path`; with `key`, of its key."""


@dataclass(frozen=True)
class Source:
    """Plain data and where it came from.

    Args:
        name: What errors call it; a file's path.
        data: Dicts, lists, strings, numbers, booleans and None.
        root: The parsed tree behind `data`; None when the data was built in Python.
        origins: Places of values that were set from elsewhere (`--set`); they hold for everything below, too.
    """

    name: str
    data: Any
    root: Value | None = None
    origins: Mapping[KeyPath, Position] = field(default_factory=dict)

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Return where the value at `path` is written; with `key`, where its key is.

        A path that does not exist has the place of its nearest ancestor's key.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        if self.root is None:
            return Position(dotted(path) or self.name)
        return _locate(self.root, path, key)


def _locate(root: Value, path: KeyPath, key: bool) -> Position:
    value, place = root, root.position
    for part in path:
        if isinstance(value.content, dict) and part in value.content:
            pair: Pair = value.content[part]
            value, place = pair.value, pair.position
        elif isinstance(value.content, tuple) and isinstance(part, int) and 0 <= part < len(value.content):
            value = value.content[part]
            place = value.position
        else:
            return place
    return place if key else value.position


def dotted(path: KeyPath) -> str:
    """Return `path` as people write it; a key that holds a dot is quoted."""
    parts = [str(part) for part in path]
    return ".".join(f'"{part}"' if "." in part else part for part in parts)


def problem_at(
    places: Places,
    path: KeyPath,
    message: str,
    *,
    found: object = None,
    expected: str | None = None,
    fix: str | None = None,
    key: bool = False,
) -> SpecError:
    """Return (not raise) the error for what stands at `path`.

    Args:
        places: The source, or the resolved spec, whose options may come from `defaults`.
        path: The key path from the top of the file, such as `("stages", "dpo", "with", "loss", "beta")`.
        message: What is wrong, in one sentence.
        found: What was found there; never a secret's value.
        expected: What would have been right.
        fix: What to do about it.
        key: Point at the key and not at its value (for unknown and missing keys).
    """
    where = str(places.position(path, key=key))
    clean = Redactor().text
    return SpecError(
        clean(message),
        where=where,
        found=None if found is None else clean(str(found)),
        expected=expected,
        fix=fix,
    )


def load(path: Path) -> Source:
    """Read a pipeline file.

    Raises:
        SpecError: It cannot be read, or is not plain YAML 1.2; `where` is `file:line:column`.
    """
    name = str(path)
    shown = name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError("there is no such file", where=shown, fix="check the path") from error
    except IsADirectoryError as error:
        raise SpecError("this is a directory", where=shown, expected="a pipeline file") from error
    except (OSError, ValueError) as error:
        raise SpecError("this file cannot be read", where=shown, found=error) from error
    if len(raw) > MAX_BYTES:
        raise SpecError("this file is too large", where=shown, expected=f"at most {MAX_BYTES} bytes")
    return read(_decode(raw, shown), shown)


def read(text: str, name: str) -> Source:
    """Parse YAML `text`; `name` is what errors call it. Raises as `load` does."""
    root = build(text, name)
    return Source(name, root.plain, root)


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        valid = raw[: error.start].decode("utf-8", "replace").split("\n")
        raise SpecError(
            "this file is not UTF-8 text",
            where=str(Position(name, len(valid), len(valid[-1]) + 1)),
            found=f"the byte 0x{raw[error.start]:02x}",
            fix="save it as UTF-8",
        ) from error
