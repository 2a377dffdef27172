"""JSON Lines: one object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.reading.lines import lines, not_utf8
from posttrain_plugins.data.reading.parsing import DECODER, json_type, told

Row = dict[str, Any]


def read(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows and their lines; what is wrong is collected and raised at the end.

    Raises:
        DataError: Lines are no JSON objects in UTF-8.
    """
    problems = Problems(str(path))
    number, line = 0, b""
    for number, line in lines(path):
        if line.isspace():
            continue
        place = f"line {number}"
        row = _parsed(line, place, problems)
        if row is not None:
            yield place, row
    problems.check(fix=_cut_off(number, line, problems))


def _parsed(line: bytes, place: str, problems: Problems) -> Row | None:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        problems.add(place, not_utf8(error))
        return None
    try:
        value, end = DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        problems.add(place, told(error, text))
        return None
    if end < len(text):
        problems.add(place, f"invalid JSON: something follows the object at column {end + 1}")
        return None
    if not isinstance(value, dict):
        problems.add(place, f"a row must be a JSON object, not {json_type(value)}")
        return None
    return value


def _cut_off(number: int, last: bytes, problems: Problems) -> str | None:
    broken = problems.count == 1 and problems.shown[0].startswith(f"line {number}: invalid JSON")
    if not broken or last.endswith(b"\n"):
        return None
    return "the last line has no line break; the file may have been cut off"
