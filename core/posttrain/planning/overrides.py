"""`--set stages.dpo.with.loss.beta=0.2`: values from the command line that beat the file."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.errors import SpecError
from posttrain.planning.source import KeyPath, Position, Source, dotted, read
from posttrain.planning.tree import resolve_plain
from posttrain.wording import did_you_mean, listed

_TOP = ("name", "plugins", "defaults", "stages")
_PARTS = ("with", "resources", "runtime")
_SEGMENT = re.compile(r'"(?P<quoted>[^"]+)"|(?P<bare>[^."=\s]+)')
_FORM = 'KEY.PATH=VALUE, such as stages.dpo.with.loss.beta=0.2; a key with a dot goes in "quotes"'


def apply(data: dict[str, Any], sets: Sequence[str]) -> tuple[dict[str, Any], dict[KeyPath, Position]]:
    """Return a copy of `data` with the values set, and where each came from.

    Later ones win. Missing mappings are made; a bare component name becomes `{name: …}` where a path
    goes below it.

    Args:
        data: The plain data of a pipeline file.
        sets: `KEY.PATH=VALUE` each; a value is a YAML 1.2 scalar or a flow collection.

    Raises:
        SpecError: A path names no stage or leads nowhere, or a value is no YAML. Values are not repeated.
    """
    result: dict[str, Any] = copy.deepcopy(data)
    origins: dict[KeyPath, Position] = {}
    for text in sets:
        segments, raw = _split(text)
        where = f"--set {dotted(segments)}"
        path = _joined(result, segments, where)
        made = _origin(result, path)
        assign(result, path, _value(raw, where), where)
        for below in [known for known in origins if known[: len(made)] == made]:
            del origins[below]
        origins[made] = Position(where)
    return result, origins


def _origin(data: Any, path: KeyPath) -> KeyPath:
    """Return what the override makes: `path` up to its first new key, with indices as numbers."""
    made: KeyPath = ()
    for part in path:
        step = int(part) if isinstance(data, list) and str(part).isdecimal() else part
        made = (*made, step)
        if isinstance(data, dict) and part not in data:
            break
        if isinstance(data, dict):
            data = data[part]
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            data = data[step]
        else:
            data = None
    return made


def override(source: Source, sets: Sequence[str]) -> Source:
    """Return `source` with the values set; errors about them name the `--set`. Raises as `apply` does."""
    if not sets:
        return source
    if not isinstance(source.data, dict):
        raise SpecError("the pipeline is no mapping", where=source.name, expected="a mapping with `stages`")
    data, origins = apply(source.data, sets)
    return replace(source, data=data, origins={**source.origins, **origins})


def _split(text: str) -> tuple[tuple[str, ...], str]:
    """Return the segments of the path and the text of the value."""
    segments, at = [], 0
    while match := _SEGMENT.match(text, at):
        segments.append(match["quoted"] or match["bare"])
        at = match.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    if not segments or text[at : at + 1] != "=":
        raise SpecError("this override has no KEY.PATH before a `=`", where="--set", expected=_FORM)
    return tuple(segments), text[at + 1 :]


def _value(raw: str, where: str) -> Any:
    text = raw.strip()
    if not text:
        raise SpecError(
            "this override has no value", where=where, fix='write ="" for empty text, =null for nothing'
        )
    if text[0] in "\"'[{":
        value = read(text, where).data
        if isinstance(value, dict | list) != (text[0] in "[{"):
            raise SpecError(
                "this value is no scalar or flow collection", where=where, expected="[a, b] or {a: b}"
            )
        return value
    try:
        return resolve_plain(text)
    except ValueError as error:
        raise SpecError(f"this value is {error}", where=where, expected="a finite number") from None


def _joined(data: dict[str, Any], segments: tuple[str, ...], where: str) -> KeyPath:
    """Join the segments of keys that hold dots themselves: globs under `defaults`, axes under `matrix`."""
    if segments[0] not in _TOP:
        fix = did_you_mean(segments[0], _TOP)
        raise SpecError(
            f"unknown key `{segments[0]}`", where=where, expected=f"one of {listed(_TOP)}", fix=fix
        )
    if segments[0] == "defaults":
        ends = [index for index, segment in enumerate(segments) if index > 1 and segment in _PARTS]
        return _join(segments, 1, ends[0] if ends else len(segments), data.get("defaults"))
    if segments[0] != "stages" or len(segments) < 2:
        return segments
    stages = data.get("stages")
    known = list(stages) if isinstance(stages, dict) else []
    if segments[1] not in known:
        raise SpecError(
            f"there is no stage `{segments[1]}`",
            where=where,
            expected=f"one of {listed(known)}",
            fix=did_you_mean(segments[1], known),
        )
    if segments[2:3] == ("matrix",) and len(segments) > 3 and isinstance(stages, dict):
        stage = stages[segments[1]]
        return _join(segments, 3, len(segments), stage.get("matrix") if isinstance(stage, dict) else None)
    return segments


def _join(segments: tuple[str, ...], start: int, end: int, known: Any) -> KeyPath:
    """Return the path with `segments[start:stop]` as one key: the longest known one, else up to `end`."""
    if isinstance(known, dict):
        for stop in range(len(segments), start, -1):
            if (key := ".".join(segments[start:stop])) in known:
                return (*segments[:start], key, *segments[stop:])
    return (*segments[:start], ".".join(segments[start:end]), *segments[end:])


def assign(tree: dict[str, Any], path: KeyPath, value: Any, where: str | None = None) -> None:
    """Set the value at `path` in place; missing mappings are made, bare component names opened.

    Raises:
        SpecError: The path goes through a value that has nothing below it, or past the end of a list.
    """
    holder: Any = tree
    for depth, part in enumerate(path[:-1]):
        step: Any = _index(holder, part, path, where) if isinstance(holder, list) else part
        below = holder[step] if isinstance(holder, list) else holder.get(step)
        if below is None:
            below = {}
        elif isinstance(below, str) and "with" in path[:depth]:
            below = {"name": below}
        elif not isinstance(below, dict | list):
            at = dotted(path[: depth + 1])
            raise SpecError(
                f"`{at}` has nothing below it", where=where, found="a scalar", expected="a mapping"
            )
        holder[step] = below
        holder = below
    last: Any = _index(holder, path[-1], path, where) if isinstance(holder, list) else path[-1]
    holder[last] = value


def _index(items: list[Any], part: str | int, path: KeyPath, where: str | None) -> int:
    text = str(part)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(items)):
        raise SpecError(
            f"`{dotted(path)}` leads past a list",
            where=where,
            found=text,
            expected=f"an index from 0 to {len(items) - 1}" if items else "the list is empty",
            fix="set the whole list: =[a, b]",
        )
    return int(text)
