"""The YAML tree: every value with its place, and nothing in it that a plain data file does not need.

Scalars follow the YAML 1.2 core schema: `no` is text, `1e-3` a number, `010` ten. Tags, merge keys, duplicate
keys, several documents and aliases that explode when expanded are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import SpecError

MAX_VALUES = 10_000
MAX_DEPTH = 50
_MAX_DIGITS = 400

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGERS = (
    (re.compile(r"[-+]?[0-9]+", re.ASCII), 10),
    (re.compile(r"0o[0-7]+"), 8),
    (re.compile(r"0x[0-9a-fA-F]+"), 16),
)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(frozen=True)
class Position:
    """Where a value was written. Without a line it is a name alone: an override, a key path in Python."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Value:
    """One parsed value.

    Args:
        content: A scalar, a tuple of values, or a dict from key to `Pair`.
        position: Where it begins.
        size: The number of values in it, aliases expanded.
        height: How deep it is; 1 for a scalar.
    """

    content: Any
    position: Position
    size: int = 1
    height: int = 1

    @property
    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self.content, dict):
            return {key: pair.value.plain for key, pair in self.content.items()}
        if isinstance(self.content, tuple):
            return [item.plain for item in self.content]
        return self.content


@dataclass(frozen=True)
class Pair:
    """One key of a mapping: where the key stands, and its value."""

    position: Position
    value: Value


def resolve_plain(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar by the YAML 1.2 core schema.

    Raises:
        ValueError: It is a number that cannot be represented; the message says how.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    for pattern, base in _INTEGERS:
        if pattern.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                raise ValueError("a number with too many digits")
            return int(text, base)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("a number that is not finite")
    if not _FLOAT.fullmatch(text):
        return text
    number = float(text)
    if abs(number) == float("inf"):
        raise ValueError("a number too large for a float")
    return number


def build(text: str, name: str) -> Value:
    """Parse YAML `text`; `name` is what errors call it.

    Raises:
        SpecError: It is not YAML, or uses what is refused here; `where` is `name:line:column`.
    """
    return _Builder(text, name).document()


class _Builder:
    """Builds the tree from the parser's events and counts what aliases expand to."""

    def __init__(self, text: str, name: str) -> None:
        from ruamel.yaml import events

        self._kinds = events
        self._name = name
        self._text = text
        self._events = self._parse()
        self._anchors: dict[str, Value | None] = {}
        self._values = 0

    def document(self) -> Value:
        """Return the root of the only document."""
        next(self._events)
        start = next(self._events)
        first = next(self._events, None)
        if first is None or (isinstance(first, self._kinds.ScalarEvent) and _is_absent(first)):
            raise SpecError("there is nothing in it", where=self._name, expected="a mapping with `stages`")
        if start.version is not None and tuple(start.version) != (1, 2):
            raise self._error(
                "this asks for another YAML", start, expected="1.2", fix="remove the %YAML line"
            )
        root = self._value(first, 1)
        next(self._events)
        end = next(self._events)
        if not isinstance(end, self._kinds.StreamEndEvent):
            raise self._error(
                "a second document begins here", end, expected="one document", fix="use two files"
            )
        return root

    def _parse(self) -> Iterator[Any]:
        """Yield the parser's events; whatever it stumbles over becomes an error with a place."""
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLStreamError
        from ruamel.yaml.reader import ReaderError

        try:
            yield from YAML(typ="safe", pure=True).parse(self._text)
        except ReaderError as error:
            before = self._text[: error.position].split("\n")
            raise SpecError(
                "a character that YAML does not allow",
                where=str(Position(self._name, len(before), len(before[-1]) + 1)),
                found=f"U+{ord(self._text[error.position]):04X}",
                fix='write it as an escape in a "quoted" text',
            ) from None
        except MarkedYAMLError as error:
            what = "; ".join(str(part) for part in (error.problem, error.context) if part)
            raise SpecError(
                f"this is not YAML: {what}",
                where=str(self._position(error.problem_mark or error.context_mark)),
            ) from None
        except (YAMLStreamError, ValueError, OverflowError) as error:
            raise SpecError("this is not YAML", where=self._name, found=error) from None

    def _value(self, event: Any, depth: int) -> Value:
        if isinstance(event, self._kinds.AliasEvent):
            return self._alias(event, depth)
        if event.tag is not None:
            raise self._error("tags are not allowed", event, found=event.tag, fix="remove the tag")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._count(1, depth, event)
        if isinstance(event, self._kinds.ScalarEvent):
            value = Value(self._scalar(event), self._position(event.start_mark))
        elif isinstance(event, self._kinds.SequenceStartEvent):
            value = self._sequence(event, depth)
        else:
            value = self._mapping(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _alias(self, event: Any, depth: int) -> Value:
        value = self._anchors.get(event.anchor)
        if value is None:
            inside = event.anchor in self._anchors
            raise self._error(
                "this alias stands inside its own anchor" if inside else "this alias has no anchor before it",
                event,
                found=f"*{event.anchor}",
                fix="write the value out",
            )
        self._count(value.size, depth + value.height - 1, event)
        return replace(value, position=self._position(event.start_mark))

    def _count(self, values: int, depth: int, event: Any) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise self._error(
                "this file holds too many values", event, expected=f"at most {MAX_VALUES}, aliases expanded"
            )
        if depth > MAX_DEPTH:
            raise self._error("this is nested too deeply", event, expected=f"at most {MAX_DEPTH} levels")

    def _scalar(self, event: Any) -> str | int | float | bool | None:
        if event.style is None:
            try:
                return resolve_plain(event.value)
            except ValueError as error:
                raise self._error(
                    f"this is {error}", event, fix="write a finite number, or quote the text"
                ) from None
        text = str(event.value)
        try:
            # JSON writes characters beyond the BMP as two escapes, which the parser leaves apart.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._error(
                "this text holds half a surrogate pair", event, fix="write the character itself"
            ) from None

    def _sequence(self, start: Any, depth: int) -> Value:
        items = []
        while not isinstance(event := next(self._events), self._kinds.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return self._collection(tuple(items), items, start)

    def _mapping(self, start: Any, depth: int) -> Value:
        pairs: dict[str, Pair] = {}
        while not isinstance(event := next(self._events), self._kinds.MappingEndEvent):
            key, position = self._key(event, depth + 1)
            if key in pairs:
                raise self._error(
                    f"the key `{key}` is written twice",
                    event,
                    found=f"lines {pairs[key].position.line} and {position.line}",
                    fix="remove one of them",
                )
            pairs[key] = Pair(position, self._value(next(self._events), depth + 1))
        return self._collection(pairs, [pair.value for pair in pairs.values()], start)

    def _collection(self, content: Any, children: list[Value], start: Any) -> Value:
        size = 1 + sum(child.size for child in children)
        height = 1 + max((child.height for child in children), default=0)
        return Value(content, self._position(start.start_mark), size, height)

    def _key(self, event: Any, depth: int) -> tuple[str, Position]:
        value = self._value(event, depth)
        if not isinstance(value.content, str):
            raise self._error("this key is no text", event, expected="text", fix="quote it")
        if value.content == "<<" and getattr(event, "style", None) is None:
            raise self._error(
                "merge keys are not YAML 1.2", event, found="<<", fix="use `defaults` for what stages share"
            )
        return value.content, value.position

    def _position(self, mark: Any) -> Position:
        return Position(self._name) if mark is None else Position(self._name, mark.line + 1, mark.column + 1)

    def _error(
        self,
        message: str,
        event: Any,
        *,
        found: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> SpecError:
        where = str(self._position(event.start_mark))
        return SpecError(message, where=where, found=found, expected=expected, fix=fix)


def _is_absent(event: Any) -> bool:
    return event.value == "" and event.style is None and event.anchor is None and event.tag is None
