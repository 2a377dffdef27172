"""A dataset artifact on disk: `rows.jsonl` and `prompts.txt`.

`rows.jsonl` holds one canonical JSON object a line, in UTF-8. `prompts.txt` holds a line for each row in the
same order: the hash of its prompt and, each behind a `~`, those of the prompts of a conversation's earlier
answers. Evaluation prompts are found in training data without parsing rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import DatasetFacts
from posttrain.artifacts.manifest import Artifact, canonical, digest_of
from posttrain.contracts.format import Format
from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Message, Turns, as_messages, content_text
from posttrain_plugins.data.formats import format_of, resolved
from posttrain_plugins.data.formats.values import MARGIN
from posttrain_plugins.data.judging.flaws import UNMARGINED, flaws_of
from posttrain_plugins.data.similarity.repeats import Repeats

ROWS = "rows.jsonl"
PROMPTS = "prompts.txt"

SHARED: Mapping[str, int] = {"dataset facts": 2}
"""Numerics of what every stage that writes rows tells of them; raised when facts of the same rows change."""
_HASH_LENGTH = 16
_EARLIER = "~"


class Summary:
    """Gathers the facts of a dataset while its rows go by.

    Args:
        format: The format's name.
        given: The format itself, where it is no built-in one.
    """

    def __init__(self, format: str, given: Format | None = None) -> None:
        self.name = format
        self.format = given or format_of(format)
        self.count = 0
        self._columns: tuple[str, ...] | None = None
        self._turns = False
        self._calls = False
        self._longest = 0
        self._flaws: Counter[str] = Counter()
        self._margins = 0
        self._repeats = Repeats(format, self.format.columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row into account that suits the format."""
        self.count += 1
        passages = self.format.passages(row)
        self._turns = self._turns or any(passage.conversational for passage in passages)
        self._calls = self._calls or any(map(_calls, passages))
        self._longest = max(self._longest, *map(_characters, passages))
        self._columns = shared_columns(self._columns, row, self.format)
        self._flaws.update(flaws_of(row, self.name))
        self._margins += MARGIN in row and MARGIN in self.format.scalars
        self._repeats.add(row)

    def facts(self, policy: str | None = None) -> DatasetFacts:
        """Return the facts. `columns` are those that every row has: the format's own first, then the others by name.

        Raises:
            DataError: There were no rows.
        """
        if self._columns is None:
            raise DataError("a dataset needs at least one row", found="no rows")
        return DatasetFacts(
            format=self.name,
            columns=self._columns,
            rows=self.count,
            policy=policy,
            conversational=self._turns,
            calls=self._calls,
            longest=self._longest,
            flaws=dict(sorted({**self._flaws, **self._repeats.counts(), **self._unmargined()}.items())),
        )

    def _unmargined(self) -> dict[str, int]:
        """Return how many rows lack a margin that others have."""
        lacking = self.count - self._margins
        return {UNMARGINED: lacking} if lacking and self._margins else {}


class RowWriter:
    """Writes the files of a dataset artifact row by row; a context manager.

    Args:
        directory: An existing directory to fill.
        format: The name of a canonical format.
        given: The format itself, where it is no built-in one.
    """

    def __init__(self, directory: Path, format: str, given: Format | None = None) -> None:
        self._directory = directory
        self._summary = Summary(format, given)
        self._kind = given or format
        self._files = ExitStack()

    def __enter__(self) -> RowWriter:
        self._lines = self._files.enter_context((self._directory / ROWS).open("wb"))
        self._prompts = self._files.enter_context((self._directory / PROMPTS).open("w", encoding="ascii"))
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, row: Mapping[str, Any], *, judged: bool = False) -> None:
        """Write a row.

        Args:
            row: The row.
            judged: It is known to suit the format.

        Raises:
            DataError: It does not suit the format or cannot be written as JSON.
        """
        where = f"row {self._summary.count + 1}"
        problem = None if judged else self._summary.format.problem(row)
        if problem:
            raise DataError(problem, where=where)
        self._lines.write(encode_row(row, where) + b"\n")
        self._prompts.write(" ".join(prompt_hashes(row, self._kind)) + "\n")
        self._summary.add(row)

    def facts(self, policy: str | None = None) -> DatasetFacts:
        """Return the facts of what was written; as `Summary.facts`."""
        return self._summary.facts(policy)


def write_rows(
    directory: Path, rows: Iterable[Mapping[str, Any]], format: str, policy: str | None = None
) -> DatasetFacts:
    """Write the files of a dataset artifact.

    Args:
        directory: An existing directory to fill.
        rows: The rows; each must suit `format`.
        format: One of `formats.CANONICAL`.
        policy: Digest of the policy that generated the completions.

    Returns:
        The facts.

    Raises:
        DataError: A row does not suit the format or cannot be written as JSON, or there are no rows.
    """
    with RowWriter(directory, format) as writer:
        for row in rows:
            writer.add(row)
    return writer.facts(policy)


def shared_columns(
    columns: tuple[str, ...] | None, row: Mapping[str, Any], format: str | Format
) -> tuple[str, ...]:
    """Return the columns that every row so far and `row` have: the format's own first, then by name."""
    if columns is None:
        own = resolved(format).columns
        return (*own, *sorted(set(row).difference(own)))
    return columns if all(column in row for column in columns) else tuple(c for c in columns if c in row)


def read_rows(source: Artifact | Path) -> list[dict[str, Any]]:
    """Read the rows of a dataset artifact, given as the artifact or as its directory."""
    return list(stream_rows(source))


def stream_rows(source: Artifact | Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a dataset artifact one by one."""
    directory = source.path if isinstance(source, Artifact) else source
    with (directory / ROWS).open(encoding="utf-8", newline="\n") as lines:
        yield from map(json.loads, lines)


def encode_row(row: Mapping[str, Any], where: str) -> bytes:
    """Return a row's canonical JSON in UTF-8.

    Raises:
        DataError: The row holds NaN, an infinity, half a surrogate pair or something that is not JSON; the message
            begins with the column.
    """
    try:
        return canonical(row)
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            _unwritable(row) or f"the row cannot be written as JSON: {error}", where=where
        ) from error


def prompt_hash(row: Mapping[str, Any], format: str | Format) -> str:
    """Hash what a row asks, ignoring white space around each turn: 16 hexadecimal digits.

    For `messages` the prompt is everything before the last assistant turn, for `text` it is the text itself. The
    images of a row are part of what it asks.
    """
    if format == "text":
        return _hash(["text", row["text"].strip()])
    if format == "messages":
        return _hash_turns(before_last_answer(row["messages"]), row)
    return _hash_turns(as_messages(_asked(row, format)), row)


def prompt_hashes(row: Mapping[str, Any], format: str | Format) -> tuple[str, ...]:
    """Hash every prompt that a row answers: `prompt_hash`, then a conversation's earlier ones behind a `~`."""
    last = prompt_hash(row, format)
    if format != "messages":
        return (last,)
    return (last, *(_EARLIER + _hash_turns(turns, row) for turns in _prompts(row["messages"])[:-1]))


def trained_prompts(hashes: Iterable[str]) -> frozenset[str]:
    """Return the hashes of every prompt in `prompts.txt` whose answer training learns."""
    return frozenset(each.removeprefix(_EARLIER) for each in hashes)


def asked_prompts(hashes: Iterable[str]) -> frozenset[str]:
    """Return the hashes of the prompts in `prompts.txt` that an evaluation asks: one for each row."""
    return frozenset(each for each in hashes if not each.startswith(_EARLIER))


def first_prompt_hash(row: Mapping[str, Any], format: str | Format) -> str:
    """Hash the prompt of a row's first answer; rows that have any prompt in common have this one in common."""
    if format != "messages":
        return prompt_hash(row, format)
    return _hash_turns(next(iter(_prompts(row["messages"])), row["messages"]), row)


def is_conversation(row: Mapping[str, Any], format: str | Format) -> bool:
    """Whether a row holds messages, which need a chat template, rather than plain strings."""
    return any(passage.conversational for passage in resolved(format).passages(row))


def before_last_answer(messages: list[Message]) -> list[Message]:
    """Return the messages before the last assistant turn; all of them when there is none."""
    prompts = _prompts(messages)
    return prompts[-1] if prompts else messages


def _prompts(messages: list[Message]) -> list[list[Message]]:
    """Return what stands before each assistant turn."""
    return [messages[:i] for i, message in enumerate(messages) if message["role"] == "assistant"]


def _asked(row: Mapping[str, Any], format: str | Format) -> Turns:
    """Return the prompt of a row: its column, or what a format that has none says."""
    if "prompt" in row:
        prompt: Turns = row["prompt"]
        return prompt
    first = resolved(format).passages(row)[0]
    return first.prompt if first.prompt is not None else first.completion or ""


def _hash_turns(turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
    asked = [_turn(message) for message in turns]
    images = row.get("images")
    return _hash([*asked, ["images", images]] if images else asked)


def _turn(message: Mapping[str, Any]) -> list[Any]:
    turn: list[Any] = [message["role"], content_text(message).strip()]
    calls = message.get("tool_calls")
    return [*turn, calls] if calls else turn


def _hash(value: Any) -> str:
    return digest_of(value)[:_HASH_LENGTH]


def _calls(passage: Passage) -> bool:
    """Whether a turn of a passage calls tools."""
    parts = (passage.prompt, passage.completion)
    turns = (turn for part in parts if part is not None and not isinstance(part, str) for turn in part)
    return any(turn.get("tool_calls") for turn in turns)


def _characters(passage: Passage) -> int:
    """Count the characters of a passage's texts."""
    return sum(_length(part) for part in (passage.prompt, passage.completion) if part is not None)


def _length(part: Turns) -> int:
    return len(part) if isinstance(part, str) else sum(len(content_text(message)) for message in part)


def _unwritable(row: Mapping[str, Any]) -> str | None:
    """Say which column cannot be written as JSON, and why."""
    for column, value in row.items():
        try:
            canonical({column: value})
        except UnicodeEncodeError as error:
            return (
                f"`{column}` holds half a surrogate pair, which is not text ({error.object[error.start]!a})"
            )
        except RecursionError:
            return f"`{column}` is nested too deeply to be written as JSON"
        except (TypeError, ValueError) as error:
            return f"`{column}` cannot be written as JSON: {error}"
    return None
