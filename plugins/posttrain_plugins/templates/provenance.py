"""Strings that know where their characters come from, whatever a chat template does to them.

A traced string is made of pieces. A piece is the template's own text, or characters of one string of the
conversation (its source), with the offset at which they stand there and the recipe that makes them from it.
Offsets tell which characters of a source are shown; recipes make the same piece from another row's string.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

NOWHERE = -1
"""The offset of characters that do not stand in their source one by one (upper case, JSON escapes)."""


class Source(NamedTuple):
    """A string of a conversation.

    Args:
        message: Index of the message; `TOOLS` for the tools.
        path: Keys and indices that lead to it in the message.
        key: Whether it is the key that `path` ends with, not the value.
    """

    message: int
    path: tuple[str | int, ...]
    key: bool = False


TOOLS = -1


class Step(NamedTuple):
    """One thing done to a string: `function(text, *arguments)`, and which of its results is meant."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    result: int | None = None


Recipe = tuple[Step, ...]


class Mark(NamedTuple):
    """A place in the text: where a loop, an iteration or a marked stretch begins or ends."""

    kind: str
    value: Any = None


class Piece(NamedTuple):
    """A stretch of a traced string; without a source it is the template's own, and a mark has no length."""

    length: int
    source: Source | None = None
    offset: int = NOWHERE
    recipe: Recipe | None = None
    mark: Mark | None = None


def made(recipe: Recipe, text: str) -> str:
    """Follow a recipe.

    Raises:
        IndexError: A step has fewer results for this text.
    """
    value: Any = text
    for function, arguments, result in recipe:
        value = function(value, *arguments)
        if result is not None:
            value = value[result]
    return str(value)


def cuts(recipe: Recipe) -> Recipe:
    """Return the steps of a recipe that take characters away and leave the others as they are."""
    return tuple(step for step in recipe if step.function in _CUTTING)


class Traced(str):
    """A string with the provenance of its characters; it behaves as the plain string of the same text."""

    __slots__ = ("pieces",)
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, text: str, pieces: Iterable[Piece]) -> Traced:
        """Make a traced string; the pieces' lengths sum to that of the text."""
        self = str.__new__(cls, text)
        self.pieces = tuple(pieces)
        return self

    @classmethod
    def from_source(cls, text: str, source: Source) -> Traced:
        """Make the traced string of a conversation's string."""
        return cls.of(text, (Piece(len(text), source, 0, ()),) if text else ())

    @classmethod
    def lift(cls, value: Any) -> Traced:
        """Return a value as a traced string, as `str` makes it text."""
        return value if isinstance(value, Traced) else traced_text(value)

    def _recipe(self, step: Step | None) -> Recipe | None:
        """Return how `step` makes its result from a source, when this string is one piece with a known recipe."""
        if step is None or len(self.pieces) != 1 or sources(step.arguments):
            return None
        recipe = self.pieces[0].recipe
        return None if recipe is None else (*recipe, step)

    def cut(self, start: int, stop: int, step: Step | None = None) -> Traced:
        """Return the characters from `start` up to `stop`, which `step` makes of the whole."""
        recipe = self._recipe(step)
        kept, at = [], 0
        for piece in self.pieces:
            first, last = max(start, at), min(stop, at + piece.length)
            if piece.mark is not None and start <= at <= stop:
                kept.append(piece)
            elif first < last:
                offset = piece.offset if piece.offset == NOWHERE else piece.offset + first - at
                whole = last - first == piece.length
                kept.append(piece._replace(length=last - first, offset=offset))
                if recipe is not None or not whole:
                    kept[-1] = kept[-1]._replace(recipe=recipe)
            at += piece.length
        return Traced.of(str.__getitem__(self, slice(start, stop)), kept)

    def became(self, text: str, step: Step | None = None, *others: Any) -> Traced:
        """Return what an operation that rewrites characters made of this string and `others`."""
        if str(text) == str(self) and step is None:
            return self
        recipe = self._recipe(step)
        if recipe is not None:
            only = self.pieces[0]
            offset = only.offset if text == self else NOWHERE
            return _piece(text, only.source, offset, recipe)
        found = [*sources(self), *(source for other in others for source in sources(other))]
        return _piece(text, found[0] if found else None, NOWHERE, None)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return joined([self] * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        plain = str.__mod__(str.__str__(self), values)
        given = values if isinstance(values, tuple) else (values,)
        parts = re.split(r"%[sd]", self)
        if "%" in "".join(parts) or len(parts) != len(given) + 1:
            return self.became(plain, None, *given)
        pieces = [self.cut(0, len(parts[0]))]
        at = len(parts[0])
        for value, part in zip(given, parts[1:], strict=True):
            at += 2
            pieces += [traced_text(value), self.cut(at, at + len(part))]
            at += len(part)
        text = joined(pieces)
        return text if text == plain else self.became(plain, None, *given)

    def __rmod__(self, template: Any) -> Any:
        if not isinstance(template, str):
            return NotImplemented
        return Traced.lift(template) % self

    def __getitem__(self, key: Any) -> Traced:
        text, step = str.__getitem__(self, key), Step(str.__getitem__, (key,))
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self.cut(at, at + 1, step)
        start, stop, stride = key.indices(len(self))
        return self.cut(start, max(start, stop), step) if stride == 1 else self.became(text, step)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(at, at + 1) for at in range(len(self)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        """As `str.replace`; a traced `new` keeps its provenance."""
        text = str.replace(self, old, new, count)
        if sources(new) and old:
            return Traced.lift(joined_by(Traced.lift(new), self.split(old, count)))
        return self.became(text, Step(str.replace, (str(old), str(new), count)))

    def join(self, parts: Iterable[str], /) -> str:
        """As `str.join`."""
        return joined_by(self, parts)

    def format(self, *values: Any, **named: Any) -> Traced:
        """As `str.format`; the whole is said to come from the first traced string."""
        text = str.format(str.__str__(self), *values, **named)
        return self.became(text, None, *values, *named.values())


_START: Mapping[str, Callable[[str, str, tuple[Any, ...]], int]] = {
    "strip": lambda text, left, arguments: len(text) - len(str.lstrip(text, *arguments)),
    "lstrip": lambda text, left, arguments: len(text) - len(left),
    "removeprefix": lambda text, left, arguments: len(text) - len(left),
    "rstrip": lambda text, left, arguments: 0,
    "removesuffix": lambda text, left, arguments: 0,
}
"""Where what is left begins when characters are taken from the ends of a text."""
_REWRITING = (
    *("upper", "lower", "title", "capitalize", "casefold", "swapcase"),
    *("expandtabs", "zfill", "center", "ljust", "rjust", "translate"),
)
_SPLITTING = ("split", "rsplit", "splitlines", "partition", "rpartition")


_CUTTING = frozenset([str.__getitem__, *(getattr(str, name) for name in (*_START, *_SPLITTING))])


def _trimming_method(name: str) -> Callable[..., Traced]:
    function, start_of = getattr(str, name), _START[name]

    def method(self: Traced, *arguments: Any) -> Traced:
        left = function(self, *arguments)
        start = start_of(self, left, arguments)
        return self.cut(start, start + len(left), Step(function, arguments))

    return method


def _rewriting_method(name: str) -> Callable[..., Traced]:
    function = getattr(str, name)

    def method(self: Traced, *arguments: Any) -> Traced:
        return self.became(function(self, *arguments), Step(function, arguments))

    return method


def _splitting_method(name: str) -> Callable[..., Any]:
    function = getattr(str, name)
    signature = inspect.signature(function)

    def method(self: Traced, *given: Any, **named: Any) -> Any:
        bound = signature.bind(self, *given, **named)
        bound.apply_defaults()
        arguments = bound.args[1:]
        texts = function(self, *arguments)
        parts = list(_parts(self, texts, function, arguments))
        return tuple(parts) if isinstance(texts, tuple) else parts

    return method


def _parts(
    text: Traced, parts: Iterable[str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Iterator[Traced]:
    """Yield the parts of a text, which stand in it one behind the other."""
    separator = arguments[0] if arguments and isinstance(arguments[0], str) else None
    between = 0 if separator is None or "partition" in function.__name__ else len(separator)
    at = 0
    for number, part in enumerate(parts):
        if separator is None:
            at = str.find(text, part, at)
        yield text.cut(at, at + len(part), Step(function, arguments, number))
        at += len(part) + between


for _names, _method in (
    (_START, _trimming_method),
    (_REWRITING, _rewriting_method),
    (_SPLITTING, _splitting_method),
):
    for _name in _names:
        setattr(Traced, _name, _method(_name))


def _piece(text: str, source: Source | None, offset: int, recipe: Recipe | None) -> Traced:
    return Traced.of(text, (Piece(len(text), source, offset, recipe),) if text else ())


def joined(parts: Iterable[Any]) -> str:
    """Concatenate strings as `"".join`; the result is traced when one of them is."""
    texts: list[Any] = []
    pieces: list[Piece] = []
    traced = False
    for part in parts:
        texts.append(part)
        if isinstance(part, Traced):
            traced = True
            pieces.extend(part.pieces)
        elif part:
            if pieces and pieces[-1].source is None and pieces[-1].mark is None:
                pieces[-1] = Piece(pieces[-1].length + len(part))
            else:
                pieces.append(Piece(len(part)))
    text = "".join(texts)
    return Traced.of(text, pieces) if traced else text


def joined_by(separator: str, parts: Iterable[Any]) -> str:
    """Concatenate strings with a separator between them."""
    woven: list[Any] = []
    for part in parts:
        if woven:
            woven.append(separator)
        woven.append(part)
    return joined(woven)


def sources(value: Any) -> list[Source]:
    """Return the sources of the strings in a value, in their order."""
    if isinstance(value, Traced):
        return [piece.source for piece in value.pieces if piece.source is not None]
    if isinstance(value, dict):
        return [source for pair in value.items() for part in pair for source in sources(part)]
    if isinstance(value, list | tuple):
        return [source for part in value for source in sources(part)]
    return []


def traced_text(value: Any) -> Traced:
    """Return `str(value)`; what is printed of a container is said to come from the first string in it."""
    if isinstance(value, Traced):
        return value
    text = str(value)
    found = [] if isinstance(value, str) else sources(value)
    return _piece(text, found[0] if found else None, NOWHERE, None)
