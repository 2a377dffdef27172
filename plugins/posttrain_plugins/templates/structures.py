"""What rows have in common that a chat template writes in the same way."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain_plugins.templates.render import parse

if TYPE_CHECKING:
    from jinja2 import nodes

_PLAIN = 0
_CALLS = ("strip", "lstrip", "rstrip", "join", "get", "items", "append", "strftime_now", "raise_exception")
_FILTERS = ("join", "default", "d", "tojson", "map", "selectattr", "rejectattr", "groupby", "indent", "sort")
"""What is given strings that say nothing about what a content holds."""


class Structures:
    """Tells which conversations a template writes in the same way.

    Args:
        source: The template; what it looks for in strings is what tells them apart.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        arguments: Mapping[str, Any],
        learned: tuple[int, ...],
        open_: bool,
    ) -> Hashable:
        """Return what a conversation has in common with others; equal for those written in the same way."""
        kind = self._kind
        shapes = tuple(
            tuple([(key, value if key == "role" else kind(value)) for key, value in message.items()])
            for message in messages
        )
        return shapes, learned, open_, _frozen(tools), _frozen(arguments) if arguments else None

    def _kind(self, value: Any) -> Hashable:
        if isinstance(value, str):
            return self._text_kind(value)
        if isinstance(value, Mapping):
            return tuple([(key, part if key == "type" else self._kind(part)) for key, part in value.items()])
        if isinstance(value, list | tuple):
            return tuple([self._kind(part) for part in value])
        return type(value), value

    def _text_kind(self, text: str) -> Hashable:
        """Return how a template may tell a string from others."""
        if not text:
            return ""
        inside, whole = self._needles
        blank = text[0].isspace(), text[-1].isspace()
        found = [needle for needle in inside if needle in text]
        if not found and not any(blank) and text not in whole:
            return _PLAIN
        inner = text.strip()
        if not inner or inner in whole:
            return text
        ends = [
            (part.startswith(needle), part.endswith(needle)) for needle in found for part in (text, inner)
        ]
        return blank, tuple(found), tuple(ends)

    @cached_property
    def _needles(self) -> tuple[tuple[str, ...], frozenset[str]]:
        inside: set[str] = set()
        whole: set[str] = set()
        for constant, is_whole in _constants(parse(self._source)):
            (whole if is_whole else inside).add(constant)
        return tuple(sorted(inside)), frozenset(whole)


def _constants(tree: nodes.Template) -> Iterator[tuple[str, bool]]:
    """Yield the strings that a template compares with others, and whether with them as a whole."""
    from jinja2 import nodes

    for compare in tree.find_all(nodes.Compare):
        inside = {"in", "notin"}.issuperset(operand.op for operand in compare.ops)
        yield from ((text, not inside) for text in _strings([compare.expr]))
        yield from ((text, True) for operand in compare.ops for text in _strings([operand.expr]))
    for call in tree.find_all(nodes.Call):
        if getattr(call.node, "attr", getattr(call.node, "name", None)) not in _CALLS:
            yield from ((text, False) for text in _strings(call.args))
    for one in tree.find_all((nodes.Filter, nodes.Test)):
        if one.name not in _FILTERS:
            yield from ((text, isinstance(one, nodes.Test)) for text in _strings(one.args))


def _strings(expressions: Sequence[nodes.Expr]) -> Iterator[str]:
    from jinja2 import nodes

    for expression in expressions:
        own = [expression] if isinstance(expression, nodes.Const) else expression.find_all(nodes.Const)
        yield from (constant.value for constant in own if isinstance(constant.value, str) and constant.value)


def _frozen(value: Any) -> Hashable:
    """Return a value that is equal and hashable for equal JSON."""
    if isinstance(value, Mapping):
        return tuple([(key, _frozen(part)) for key, part in value.items()])
    if isinstance(value, list | tuple):
        return tuple([_frozen(part) for part in value])
    return type(value), value
