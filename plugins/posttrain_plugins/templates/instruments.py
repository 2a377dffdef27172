"""The jinja environment of a traced render: the sandbox of a plain one, with operations that keep provenance."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import filters, nodes, pass_eval_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from posttrain_plugins.templates.provenance import (
    Mark,
    Piece,
    Step,
    Traced,
    joined,
    joined_by,
    sources,
    traced_text,
)
from posttrain_plugins.templates.render import equip, generation_tag, tojson


class _Environment(ImmutableSandboxedEnvironment):
    """Joins traced strings; methods of plain strings and filters that are given traced ones stay traced."""

    concat = staticmethod(joined)
    intercepted_binops = frozenset({"%"})

    def join_texts(self, *values: Any) -> str:
        """Concatenate values as `~` does."""
        return joined(map(traced_text, values))

    def mark(self, kind: str, value: Any = None) -> Traced:
        """Return a mark, which is text of no length."""
        return Traced.of("", (Piece(0, mark=Mark(kind, value)),))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and sources(right):
            left = traced_text(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and sources([*args, *kwargs.values()]):
            __obj = getattr(traced_text(owner), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _following(wrapped, getattr(value, "__self__", ""))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Marking().visit(super()._parse(source, name, filename))
        return tree


class _Marking(NodeTransformer):
    """Rewrites `~`, and puts marks around loops and at the start of their bodies."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("join_texts", node.nodes).set_lineno(node.lineno)

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        target = node.target
        value = nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else nodes.Const(None)
        node.body = [_mark("enter", value), *node.body]
        marked = [_mark("before"), node, _mark("after")]
        return [part.set_lineno(node.lineno) for part in marked]


def _mark(kind: str, *values: nodes.Expr) -> nodes.Node:
    return nodes.Output([_environment_call("mark", [nodes.Const(kind), *values])])


def _environment_call(name: str, arguments: Iterable[nodes.Expr]) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


@lru_cache(maxsize=1)
def tracing_environment() -> _Environment:
    """Return the environment of traced renders."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_tag(_marked), loopcontrols]
    )
    equip(environment)
    environment.finalize = _printed
    environment.filters = {
        **{name: _tainting(function) for name, function in environment.filters.items()},
        "join": _join,
        "string": traced_text,
        "safe": traced_text,
        "replace": _replace,
        "tojson": traced_json,
    }
    return environment


def _marked(text: str) -> str:
    """Put marks around what stands inside `{% generation %}`."""
    edges = [Traced.of("", (Piece(0, mark=Mark(kind)),)) for kind in ("begin", "finish")]
    return joined((edges[0], text, edges[1]))


def _printed(value: Any) -> Any:
    return traced_text(value) if isinstance(value, dict | list | tuple) else value


def _following(function: Callable[..., str], owner: str) -> Callable[..., str]:
    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> str:
        return traced_text(owner).became(function(*args, **kwargs), None, *args, *kwargs.values())

    return followed


def _tainting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Say of the text that a filter makes that it comes from the strings it was given."""
    if isinstance(function, type | Macro):
        return function

    @functools.wraps(function)
    def tainted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, str) and not isinstance(result, Traced):
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Traced)]
            if sources(given):
                return given[0].became(str(result), None, *given[1:])
        return result

    return tainted


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(context.environment, attribute), value)
    return joined_by(d, map(traced_text, value))


def _replace(s: str, old: str, new: str, count: int | None = None) -> str:
    return traced_text(s).replace(str(old), traced_text(new), -1 if count is None else count)


def traced_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON whose strings keep their provenance."""
    text = tojson(value, ensure_ascii, indent, separators, sort_keys)
    if not sources(value):
        return text
    item, colon = separators or ("," if indent is not None else ", ", ": ")
    written = joined(_json(value, _Layout(ensure_ascii, indent, item, colon, sort_keys), 0))
    if written == text:
        return written
    return traced_text("").became(text, None, value)


class _Layout:
    """How JSON is laid out."""

    def __init__(self, ascii: bool, indent: Any, item: str, colon: str, sort: bool) -> None:
        self.indent = " " * indent if isinstance(indent, int) else indent
        self.ascii, self.item, self.colon, self.sort = ascii, item, colon, sort

    def line(self, depth: int) -> str:
        return "" if self.indent is None else "\n" + self.indent * depth


def _json(value: Any, layout: _Layout, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield _json_string(value, layout.ascii)
    elif isinstance(value, Mapping) and value:
        pairs = sorted(value.items()) if layout.sort else value.items()
        parts = [
            [_json_string(key, layout.ascii), layout.colon, *_json(part, layout, depth + 1)]
            for key, part in pairs
        ]
        yield from _brackets("{", "}", parts, layout, depth)
    elif isinstance(value, list | tuple) and value:
        parts = [list(_json(part, layout, depth + 1)) for part in value]
        yield from _brackets("[", "]", parts, layout, depth)
    else:
        yield json.dumps(value)


def _brackets(start: str, end: str, parts: list[list[str]], layout: _Layout, depth: int) -> Iterator[str]:
    yield start
    for number, part in enumerate(parts):
        yield (layout.item if number else "") + layout.line(depth + 1)
        yield from part
    yield layout.line(depth) + end


def _json_string(value: Any, ascii: bool) -> str:
    inner = traced_text(value)
    if len(inner.pieces) == 1 or escaped(inner, ascii) != inner:
        inner = inner.became(escaped(inner, ascii), Step(escaped, (ascii,)))
    return joined(('"', inner, '"'))


def escaped(text: str, ascii: bool) -> str:
    """Return what stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=ascii)[1:-1]
