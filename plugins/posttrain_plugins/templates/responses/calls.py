"""Tool calls in answers: strict JSON, values written bare, and blocks between tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.wording import either
from posttrain_plugins.templates.responses.parsed import Draft, Tools, shortened

_KINDS: Mapping[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class Malformed(ValueError):
    """A tool call cannot be read; the message says why."""


def tool_call(name: Any, arguments: Any, id: Any = None) -> dict[str, Any]:
    """Return a tool call of a message.

    Raises:
        Malformed: There is no name, or the arguments are no object.
    """
    if not isinstance(name, str) or not name.strip():
        raise Malformed("a tool call has no name")
    if not isinstance(arguments, dict):
        raise Malformed(
            f"the arguments of `{name}` are not a JSON object: {shortened(json.dumps(arguments))}"
        )
    call = {"type": "function", "function": {"name": name.strip(), "arguments": arguments}}
    return call if id is None else {"id": id, **call}


def from_json(value: Any, arguments: str = "arguments") -> dict[str, Any]:
    """Return a tool call from an object with a name and arguments.

    Args:
        value: The object.
        arguments: The key of the arguments.

    Raises:
        Malformed: It is something else.
    """
    if not isinstance(value, dict):
        raise Malformed(f"a tool call is not a JSON object: {shortened(json.dumps(value))}")
    if arguments not in value:
        raise Malformed(f"a tool call has no `{arguments}`: {shortened(json.dumps(value))}")
    return tool_call(value.get("name"), value[arguments], value.get("id"))


def loads(text: str) -> Any:
    """Read strict JSON: no duplicate keys, no NaN.

    Raises:
        Malformed: It is something else.
    """
    value, rest = loads_first(text.strip())
    if rest:
        raise Malformed(f"text follows the JSON of a tool call: {shortened(rest)}")
    return value


def loads_first(text: str) -> tuple[Any, str]:
    """Read one JSON value at the beginning of a text; return it and the rest.

    Raises:
        Malformed: The text begins with something else.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refused)
    try:
        value, end = decoder.raw_decode(text)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a tool call is not valid JSON ({error}): {shortened(text)}") from error
    return value, text[end:]


def typed(text: str, name: str, key: str, tools: Tools) -> Any:
    """Return a value that is written without quotes, by the tool's schema where there is one.

    Without a schema, what reads as JSON is that value, and everything else a string.

    Args:
        text: The value as written.
        name: The tool.
        key: The parameter.
        tools: The tools that could be called.

    Raises:
        Malformed: It is not of the type that the schema asks for.
    """
    types = _types(name, key, tools)
    if types and types <= {"string"}:
        return text
    value = _bare(text, types)
    if isinstance(value, str):
        value = text
    if not types or _kinds(value) & types:
        return value
    if "string" in types:
        return text
    wanted = either(types)
    raise Malformed(f"`{key}` of `{name}` is no {wanted}: {shortened(text)}")


def blocks(text: str, opening: str, closing: str, draft: Draft, gap: int = 0) -> Iterator[str]:
    """Yield what is between tags; put the text before, and any that is astray, into a draft.

    Args:
        text: An answer without its reasoning.
        opening: Opens a block.
        closing: Closes it.
        draft: What to add to.
        gap: How many line breaks the format puts between text and the first block.
    """
    before, found, rest = text.partition(opening)
    for _ in range(gap if found else 0):
        before = before.removesuffix("\n")
    draft.content.append(before)
    while found:
        block, closed, after = rest.partition(closing)
        if not closed:
            draft.report(f"a tool call never ends: there is no `{closing}`", opening + block)
            return
        yield block
        between, found, rest = after.partition(opening)
        if between.strip():
            draft.report(f"text follows a tool call: {shortened(between.strip())}", between)


def _bare(text: str, types: set[str]) -> Any:
    """Read JSON, or what templates that print Python values make of booleans and null; else return the text."""
    spoken: dict[str, Any] = {"true": True, "false": False} if "boolean" in types else {}
    spoken |= {"none": None} if "null" in types else {}
    if text.lower() in spoken:
        return spoken[text.lower()]
    try:
        return loads(text)
    except Malformed:
        return text


def _kinds(value: Any) -> set[str]:
    """Return the types that a JSON schema may call a value."""
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return _KINDS[type(value)]


def _types(name: str, key: str, tools: Tools) -> set[str]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = (function.get("parameters") or {}).get("properties", {}).get(key)
            kind = schema.get("type") if isinstance(schema, Mapping) else None
            return {kind} if isinstance(kind, str) else set(kind or ())
    return set()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"a tool call has the key `{key}` twice")
        found[key] = value
    return found


def _refused(name: str) -> Any:
    raise Malformed(f"a tool call holds {name}, which is not JSON")
