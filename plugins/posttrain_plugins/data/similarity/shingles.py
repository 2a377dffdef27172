"""The text of rows in parts, their words, and runs of words: what deduplication and contamination compare."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Message, as_messages, content_text
from posttrain_plugins.data.formats import required
from posttrain_plugins.data.rows import before_last_answer

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = Mapping[str, Any]
Path = tuple[str, ...]

ROW = "row"
PROMPT = "prompt"

_BESIDES = ("tools", "chat_template_kwargs", "image", "images")
"""Columns that change what a row of any format says."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a turn that hold text before its content."""
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Scripts that put no space between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_SYMBOL = re.compile(r"\S")
_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that no word of a run is lost modulo 2**64."""


@dataclass
class Content:
    """What a row, or a part of it, says.

    Args:
        texts: Its texts by where they stand, such as `("prompt",)` or `("messages", "user")`, in order.
        rest: Everything else that means something: labels, tool schemas, images.
    """

    texts: dict[Path, list[str]] = field(default_factory=dict)
    rest: list[Any] = field(default_factory=list)


def content_of(row: Row, format: str, on: str) -> Content:
    """Return what is compared of a row.

    Args:
        row: The row.
        format: Its format.
        on: `row`, all that the format reads; `prompt`, what is asked; or the name of a column.

    Raises:
        DataError: The row has no such column.
    """
    found = Content()
    for column, value in chosen(row, format, on).items():
        if column in _BESIDES:
            found.rest.append([column, value])
        else:
            _collect(found, (column,), value)
    return found


def chosen(row: Row, format: str, on: str) -> dict[str, Any]:
    """Return the values that are compared of a row, by column; as `content_of`, before they are taken apart."""
    if on in (ROW, PROMPT):
        own = {PROMPT: prompt_turns(row, format)} if on == PROMPT else {c: row[c] for c in required(format)}
        return {**own, **{column: row[column] for column in _BESIDES if row.get(column)}}
    if on not in row:
        raise DataError(
            f"a row has no column `{on}`",
            found=f"columns {', '.join(map(str, row))}",
            expected="a column that every row has, `row` or `prompt`",
        )
    return {on: row[on]}


def prompt_turns(row: Row, format: str) -> list[Message]:
    """Return what a row asks, as messages; of `text` the text itself, as one user turn."""
    if format == "text":
        return as_messages(row["text"])
    return before_last_answer(row["messages"]) if format == "messages" else as_messages(row["prompt"])


def words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation; of a text without words, its characters.

    In scripts without spaces between words, a character is a word.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(plain) or _SYMBOL.findall(plain)


def folded(value: Any) -> Any:
    """Return a JSON value whose strings have no case and single spaces alone."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFKC", value).casefold().split())
    if isinstance(value, Mapping):
        return {key: folded(each) for key, each in value.items()}
    return [folded(each) for each in value] if isinstance(value, list | tuple) else value


class Hasher:
    """Turns texts into sets of hashed shingles.

    Args:
        size: Words or characters in a shingle. A shorter text is one shingle.
        characters: Whether shingles are made of characters, white space folded, instead of words.
    """

    def __init__(self, size: int, *, characters: bool = False) -> None:
        self.size = size
        self.characters = characters
        self._known: dict[str, int] = {}

    def shingles(self, text: str) -> NDArray[Any]:
        """Return the sorted 64-bit hashes of the different shingles of a text, shape (shingles,); none if empty."""
        import numpy

        units = self._units(text)
        if not len(units):
            return units
        size = min(self.size, len(units))
        total = numpy.zeros(len(units) - size + 1, dtype=numpy.uint64)
        with numpy.errstate(over="ignore"):
            for offset in range(size):
                total = total * numpy.uint64(_MULTIPLIER) + units[offset : offset + len(total)]
            return numpy.unique(_mixed(total))

    def _units(self, text: str) -> NDArray[Any]:
        import numpy

        if self.characters:
            points = numpy.frombuffer(folded(text).encode("utf-32-le", "surrogatepass"), dtype="<u4")
            return _mixed(points.astype(numpy.uint64))
        known = self._known
        found = [known[word] if word in known else self._learn(word) for word in words(text)]
        return numpy.array(found, dtype=numpy.uint64)

    def _learn(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return self._known.setdefault(word, int.from_bytes(digest, "little"))


def _mixed(values: NDArray[Any]) -> NDArray[Any]:
    """Spread 64-bit values over their range (the finisher of splitmix64)."""
    import numpy

    with numpy.errstate(over="ignore"):
        values = values + numpy.uint64(_MULTIPLIER)
        values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        spread: NDArray[Any] = values ^ (values >> numpy.uint64(31))
    return spread


def _collect(found: Content, path: Path, value: Any) -> None:
    if isinstance(value, str):
        found.texts.setdefault(path, []).append(value)
    elif isinstance(value, list):
        for each in value:
            _collect(found, path, each)
    elif isinstance(value, Mapping) and isinstance(value.get("role"), str):
        _collect_turn(found, (*path, value["role"]), value)
    elif value is not None:
        found.rest.append([*path, value])


def _collect_turn(found: Content, path: Path, turn: Row) -> None:
    _collect(found, path, content_text(turn))
    content = turn.get("content")
    parts = content if isinstance(content, list) else []
    found.rest.extend([*path, part] for part in parts if "text" not in part)
    for name, value in sorted(turn.items()):
        if name in ("role", "content") or value is None:
            continue
        if isinstance(value, str):
            _collect(found, (*path, name), value)
        else:
            found.rest.append([*path, name, value])


def turns_of(value: Any) -> Iterator[tuple[str | None, str]]:
    """Return the texts of a value in order, each with the role of its turn: None outside of conversations."""
    if isinstance(value, str):
        yield None, value
    elif isinstance(value, list):
        for each in value:
            yield from turns_of(each)
    elif isinstance(value, Mapping) and isinstance(value.get("role"), str):
        yield from ((value["role"], value[name]) for name in _THOUGHTS if isinstance(value.get(name), str))
        yield value["role"], content_text(value)
