"""JSON: an array of objects, read an element at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from posttrain.errors import DataError
from posttrain_plugins.data.problems import Problems
from posttrain_plugins.data.reading.lines import LONGEST, begin, too_long
from posttrain_plugins.data.reading.parsing import DECODER, json_type, told

Row = dict[str, Any]

_CHUNK = 1024 * 1024
_CUT = 16
"""Characters at the end of a stretch in which a value may be cut off."""
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*([,\]])[ \t\r\n]*")


def read(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows, numbered from 1 and with the line on which each begins.

    Raises:
        DataError: The file is no array of objects in UTF-8; elements that are none are collected.
    """
    problems = Problems(str(path))
    for number, (line, value) in enumerate(_elements(path), 1):
        place = f"row {number} (line {line})"
        if isinstance(value, dict):
            yield place, value
        else:
            problems.add(place, f"a row must be a JSON object, not {json_type(value)}")
    problems.check()


def _elements(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        begin(file, path)
        window = _Window(file, path)
        window.fill()
        if not window.take("["):
            raise _no_array(path, window)
        if window.take("]"):
            window.finish()
            return
        while True:
            yield window.line, window.value()
            if window.separator() == "]":
                break
        window.finish()


class _Window:
    """A stretch of the file as text, which grows only while an element does not fit."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read = 0
        self._done = False
        self.text, self.at, self.line, self.column = "", 0, 1, 1

    def fill(self, wanted: int = _CHUNK) -> bool:
        """Read more; whether there was any."""
        if self._done:
            return False
        self.text, self.at = self.text[self.at :], 0
        piece = self._file.read(wanted)
        self._done = not piece
        try:
            self.text += self._decoder.decode(piece, final=self._done)
        except UnicodeDecodeError as error:
            start = self._read + error.start - (len(error.object) - len(piece))
            raise DataError(
                f"byte {start + 1} is not UTF-8 ({error.object[error.start]:#04x})", where=str(self._path)
            ) from error
        self._read += len(piece)
        return not self._done

    def take(self, mark: str) -> bool:
        """Go behind a mark if it is next."""
        self._skip()
        if not self.text.startswith(mark, self.at):
            return False
        self._advance(self.at + 1)
        self._skip()
        return True

    def value(self) -> Any:
        """Read the next element."""
        size = _CHUNK
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self._done or not self._may_be_cut(error):
                    raise self._invalid(error) from error
                if len(self.text) - self.at > LONGEST:
                    raise too_long(self._path, f"the row that begins on line {self.line}") from error
                self.fill(size)
                size = min(2 * size, LONGEST)
                continue
            except (ValueError, RecursionError) as error:
                raise DataError(told(error, ""), where=f"{self._path}, line {self.line}") from error
            if end == len(self.text) and self.fill():
                continue
            self._advance(end)
            return value

    def separator(self) -> str:
        """Go behind the comma or bracket that follows an element and return it."""
        self._skip()
        found = _BETWEEN.match(self.text, self.at)
        if found is None:
            raise self._wrong("expected `,` or `]` after an element")
        self._advance(found.end())
        self._skip()
        return found.group(1)

    def finish(self) -> None:
        """Refuse anything behind the array."""
        self._skip()
        if self.at < len(self.text):
            raise self._wrong("something follows the array")

    def _skip(self) -> None:
        while True:
            found = _SPACE.match(self.text, self.at)
            self._advance(found.end() if found else self.at)
            if self.at < len(self.text) or not self.fill():
                return

    def _advance(self, end: int) -> None:
        breaks = self.text.count("\n", self.at, end)
        if breaks:
            self.line += breaks
            self.column = end - self.text.rfind("\n", self.at, end)
        else:
            self.column += end - self.at
        self.at = end

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether an element may be wrong only because its rest has not been read."""
        return error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _CUT

    def _invalid(self, error: json.JSONDecodeError) -> DataError:
        self._advance(min(error.pos, len(self.text)))
        return self._wrong(error.msg)

    def _wrong(self, message: str) -> DataError:
        cut = self.at >= len(self.text)
        return DataError(
            f"invalid JSON: {message}",
            where=f"{self._path}, line {self.line}, column {self.column}",
            found="the end of the file" if cut else None,
            fix="the file may have been cut off" if cut else _lines_hint(self._path),
        )


def _no_array(path: Path, window: _Window) -> DataError:
    """Refuse a file that holds one value, or one a line."""
    hint = _lines_hint(path)
    try:
        value, _ = DECODER.raw_decode(window.text, window.at)
    except (ValueError, RecursionError) as error:
        if hint or not window.text.startswith("{", window.at):
            return DataError(told(error, window.text), where=str(path), fix=hint)
        return DataError("the file must hold an array of objects", where=str(path), found="an object")
    keys = f" with the keys {', '.join(map(str, list(value)[:12]))}" if isinstance(value, dict) else ""
    return DataError(
        "the file must hold an array of objects", where=str(path), found=json_type(value) + keys, fix=hint
    )


def _lines_hint(path: Path) -> str | None:
    with path.open("rb") as file:
        first = file.readline(LONGEST).strip()
        more = file.read(1)
    one_a_line = bool(more) and first[:1] + first[-1:] == b"{}"
    return "one object a line is JSON Lines: name the file `.jsonl`" if one_a_line else None
