from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from posttrain_plugins.templates.instruments import traced_json, tracing_environment
from posttrain_plugins.templates.provenance import NOWHERE, Source, Traced, joined, made, sources
from posttrain_plugins.templates.render import tojson

WHERE = Source(0, ("content",))
OTHER = Source(1, ("content",))
TEXTS = ["", " ", "a", "  ab c\n", "<t>a</t>b", "a\n\nb\r\nc", "aXbXXc", "éß🌍 é", "--a--", "aaa"]
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda s: s.strip(),
    "strip characters": lambda s: s.strip("-a"),
    "lstrip": lambda s: s.lstrip("\n "),
    "rstrip": lambda s: s.rstrip(),
    "removeprefix": lambda s: s.removeprefix("<t>"),
    "removesuffix": lambda s: s.removesuffix("b"),
    "split": lambda s: s.split(),
    "split at": lambda s: s.split("X"),
    "split once": lambda s: s.split("X", 1),
    "split by name": lambda s: s.split(sep="X", maxsplit=1),
    "split blanks once": lambda s: s.split(maxsplit=1),
    "rsplit": lambda s: s.rsplit("X", 1),
    "rsplit blanks": lambda s: s.rsplit(None, 1),
    "splitlines": lambda s: s.splitlines(),
    "splitlines with ends": lambda s: s.splitlines(True),
    "partition": lambda s: s.partition("</t>"),
    "rpartition": lambda s: s.rpartition("X"),
    "upper": lambda s: s.upper(),
    "title": lambda s: s.title(),
    "zfill": lambda s: s.zfill(4),
    "replace": lambda s: s.replace("X", "yy"),
    "replace once": lambda s: s.replace("a", "", 1),
    "slice": lambda s: s[1:3],
    "slice from the end": lambda s: s[-2:],
    "backwards": lambda s: s[::-1],
    "steps": lambda s: s[::2],
    "add": lambda s: s + "z",
    "add behind": lambda s: "z" + s,
    "times": lambda s: s * 2,
    "times before": lambda s: 2 * s,
    "percent": lambda s: str.__mod__("(%s)", s) if type(s) is str else s.__rmod__("(%s)"),
    "percent several": lambda s: Traced.lift("%s-%s") % (s, 1),
    "join": lambda s: Traced.lift(", ").join([s, "x", s]),
    "letters": list,
    "then": lambda s: s.split("</t>")[-1].lstrip("\n").upper(),
}


def flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_traced_string_does_what_a_string_does(name: str) -> None:
    """Pieces cover the result, exact offsets point at the same characters, and recipes make the same again."""
    operation = OPERATIONS[name]
    for text in TEXTS:
        found, expected = operation(Traced.from_source(text, WHERE)), operation(text)
        assert found == expected
        assert type(found) is type(expected) or isinstance(found, str)
        for part in flat(found):
            if not isinstance(part, Traced):
                continue
            assert sum(piece.length for piece in part.pieces) == len(part)
            at = 0
            for piece in part.pieces:
                shown = str.__getitem__(part, slice(at, at + piece.length))
                at += piece.length
                if piece.source is None:
                    continue
                if piece.offset != NOWHERE and name not in ("upper", "title", "then"):
                    assert text[piece.offset : piece.offset + piece.length] == shown
                if piece.recipe is not None:
                    assert made(piece.recipe, text) == shown


def test_what_is_made_by_a_recipe_follows_another_text() -> None:
    part = Traced.from_source("<t>a</t> b ", WHERE).split("</t>")[1].strip()
    assert isinstance(part, Traced)
    (piece,) = part.pieces
    assert piece.recipe is not None
    assert made(piece.recipe, "<t>long</t>\n other\n") == "other"
    with pytest.raises(IndexError):
        made(piece.recipe, "nothing")


def test_parts_of_joined_strings_keep_their_own_source() -> None:
    one, two = Traced.from_source("ab", WHERE), Traced.from_source("cd", OTHER)
    whole = joined(["<", one, "|", two, ">"])
    assert isinstance(whole, Traced)
    middle = whole[2:5]
    assert (str(middle), sources(middle)) == ("b|c", [WHERE, OTHER])
    assert [piece.recipe for piece in middle.pieces] == [None, None, None]
    replaced = Traced.lift("x-y").replace("-", two)
    assert (str(replaced), sources(replaced)) == ("xcdy", [OTHER])
    assert type(joined(["a", "b"])) is str


def test_a_recipe_does_not_depend_on_another_source() -> None:
    one, two = Traced.from_source("a-b", WHERE), Traced.from_source("-", OTHER)
    parts = one.split(two)
    assert parts == ["a", "b"]
    assert all(piece.recipe is None for part in parts for piece in part.pieces)  # type: ignore[attr-defined]


JSON = {"k": ['a"b', "é\n", 1, True, None, {}], "n": {"x": "y", "z": [[], ["s"]]}}


@pytest.mark.parametrize(
    "options",
    [{}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")}, {"sort_keys": True, "indent": 4}],
)
def test_json_is_spelled_as_without_traces_and_strings_keep_theirs(options: Any) -> None:
    def wrapped(value: Any) -> Any:
        if isinstance(value, str):
            return Traced.from_source(value, Source(0, (value,)))
        if isinstance(value, dict):
            return {key: wrapped(part) for key, part in value.items()}
        return [wrapped(part) for part in value] if isinstance(value, list) else value

    found = traced_json(wrapped(JSON), **options)
    assert found == tojson(JSON, **options)
    assert [source.path[0] for source in sources(found)] == ['a"b', "é\n", "y", "s"]
    assert isinstance(found, Traced)
    escaped = next(piece for piece in found.pieces if piece.source == Source(0, ('a"b',)))
    assert escaped.recipe is not None
    assert made(escaped.recipe, 'x"') == 'x\\"'


def test_keys_that_are_no_strings_are_spelled_too() -> None:
    value = {1: Traced.from_source("a", WHERE), None: 2}
    assert traced_json(value) == json.dumps(value)
    assert sources(traced_json(value)) == [WHERE]


@pytest.mark.parametrize(
    "source",
    [
        "{{ a ~ '-' ~ 1 }}",
        "{{ a | upper | trim }}",
        "{{ [a, 'x'] | join('; ') }}",
        "{{ rows | join(', ', attribute='text') }}",
        "{{ '{}:{}'.format(a, 2) }}",
        "{{ '%s, %d' % (a, 3) }}",
        "{{ ', '.join([a]) }}",
        "{{ 'x-y'.replace('-', a) }}",
        "{{ a | indent(2) }}{{ a | title }}{{ a | string }}{{ a | safe }}",
        "{{ a | replace('q', 'z') }}{{ 'q' | replace('q', a) }}",
        "{% set b %}[{{ a }}]{% endset %}{{ b | trim }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(a) }}",
        "{% filter upper %}{{ a }}{% endfilter %}",
        "{{ {'k': a} }}{{ [a] }}",
        "{{ a[1:] }}{{ a | first }}{{ a | last }}{{ a | list | join }}",
        "{% for letter in a %}{{ letter }}{% endfor %}",
        "{% generation %}{{ a }}{% endgeneration %}",
    ],
)
def test_expressions_of_templates_keep_provenance(source: str) -> None:
    from posttrain_plugins.templates.render import ChatTemplate

    plain = ChatTemplate(source, {})
    text = plain.written({"a": "quite so", "rows": [{"text": "quite so"}]})
    value = Traced.from_source("quite so", WHERE)
    found = tracing_environment().from_string(source).render({"a": value, "rows": [{"text": value}]})
    assert found == text
    assert set(sources(found)) == {WHERE}


def test_what_a_macro_writes_of_its_own_is_no_ones() -> None:
    source = "{% macro m(x) %}literal{% endmacro %}{{ m(a) }}"
    found = tracing_environment().from_string(source).render({"a": Traced.from_source("q", WHERE)})
    assert (str(found), sources(found)) == ("literal", [])
