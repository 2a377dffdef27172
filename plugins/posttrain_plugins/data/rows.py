"""A dataset artifact on disk: `rows.jsonl` and `prompts.txt`.

`rows.jsonl` holds one canonical JSON object a line, in UTF-8. `prompts.txt` holds a line for each row in the
same order: the hash of its prompt and, each behind a `~`, those of the prompts of a conversation's earlier
answers. Evaluation prompts are found in training data without parsing rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import DatasetFacts
from posttrain.artifacts.manifest import Artifact, canonical, digest_of
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Message, as_messages, content_text
from posttrain_plugins.data.formats import required, row_problem

ROWS = "rows.jsonl"
PROMPTS = "prompts.txt"

_HASH_LENGTH = 16
_EARLIER = "~"


def write_rows(
    directory: Path, rows: Iterable[Mapping[str, Any]], format: str, policy: str | None = None
) -> DatasetFacts:
    """Write the files of a dataset artifact.

    Args:
        directory: An existing directory to fill.
        rows: The rows; each must suit `format`.
        format: One of `formats.FORMATS`.
        policy: Digest of the policy that generated the completions.

    Returns:
        The facts. `columns` are those that every row has: the format's own first, then the others by name.

    Raises:
        DataError: A row does not suit the format or cannot be written as JSON, or there are no rows.
    """
    count, turns = 0, False
    columns: tuple[str, ...] | None = None
    with (directory / ROWS).open("wb") as lines, (directory / PROMPTS).open("w", encoding="ascii") as prompts:
        for count, row in enumerate(rows, 1):
            problem = row_problem(row, format)
            if problem:
                raise DataError(problem, where=f"row {count}")
            lines.write(encode_row(row, f"row {count}") + b"\n")
            prompts.write(" ".join(prompt_hashes(row, format)) + "\n")
            turns = turns or is_conversation(row, format)
            columns = shared_columns(columns, row, format)
    if columns is None:
        raise DataError("a dataset needs at least one row", found="no rows")
    return DatasetFacts(format=format, columns=columns, rows=count, policy=policy, conversational=turns)


def shared_columns(columns: tuple[str, ...] | None, row: Mapping[str, Any], format: str) -> tuple[str, ...]:
    """Return the columns that every row so far and `row` have: the format's own first, then by name."""
    if columns is None:
        own = required(format)
        return (*own, *sorted(set(row).difference(own)))
    return columns if all(column in row for column in columns) else tuple(c for c in columns if c in row)


def read_rows(source: Artifact | Path) -> list[dict[str, Any]]:
    """Read the rows of a dataset artifact, given as the artifact or as its directory."""
    directory = source.path if isinstance(source, Artifact) else source
    with (directory / ROWS).open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def encode_row(row: Mapping[str, Any], where: str) -> bytes:
    """Return a row's canonical JSON in UTF-8.

    Raises:
        DataError: The row holds NaN, an infinity, half a surrogate pair or something that is not JSON.
    """
    try:
        return canonical(row)
    except UnicodeEncodeError as error:
        raise DataError("the row holds half a surrogate pair, which is not text", where=where) from error
    except (TypeError, ValueError) as error:
        raise DataError(f"the row cannot be written as JSON: {error}", where=where) from error


def prompt_hash(row: Mapping[str, Any], format: str) -> str:
    """Hash what a row asks, ignoring white space around each turn: 16 hexadecimal digits.

    For `messages` the prompt is everything before the last assistant turn, for `text` it is the text itself.
    """
    if format == "text":
        return _hash(["text", row["text"].strip()])
    turns = before_last_answer(row["messages"]) if format == "messages" else as_messages(row["prompt"])
    return _hash_turns(turns)


def prompt_hashes(row: Mapping[str, Any], format: str) -> tuple[str, ...]:
    """Hash every prompt that a row answers: `prompt_hash`, then a conversation's earlier ones behind a `~`."""
    last = prompt_hash(row, format)
    if format != "messages":
        return (last,)
    return (last, *(_EARLIER + _hash_turns(turns) for turns in _prompts(row["messages"])[:-1]))


def trained_prompts(hashes: Iterable[str]) -> frozenset[str]:
    """Return the hashes of every prompt in `prompts.txt` whose answer training learns."""
    return frozenset(each.removeprefix(_EARLIER) for each in hashes)


def asked_prompts(hashes: Iterable[str]) -> frozenset[str]:
    """Return the hashes of the prompts in `prompts.txt` that an evaluation asks: one for each row."""
    return frozenset(each for each in hashes if not each.startswith(_EARLIER))


def first_prompt_hash(row: Mapping[str, Any], format: str) -> str:
    """Hash the prompt of a row's first answer; rows that have any prompt in common have this one in common."""
    if format != "messages":
        return prompt_hash(row, format)
    return _hash_turns(next(iter(_prompts(row["messages"])), row["messages"]))


def is_conversation(row: Mapping[str, Any], format: str) -> bool:
    """Whether a row holds messages, which need a chat template, rather than plain strings."""
    return any(isinstance(row[column], list) for column in required(format))


def before_last_answer(messages: list[Message]) -> list[Message]:
    """Return the messages before the last assistant turn; all of them when there is none."""
    prompts = _prompts(messages)
    return prompts[-1] if prompts else messages


def _prompts(messages: list[Message]) -> list[list[Message]]:
    """Return what stands before each assistant turn."""
    return [messages[:i] for i, message in enumerate(messages) if message["role"] == "assistant"]


def _hash_turns(turns: Sequence[Message]) -> str:
    return _hash([_turn(message) for message in turns])


def _turn(message: Message) -> list[Any]:
    turn: list[Any] = [message["role"], content_text(message).strip()]
    calls = message.get("tool_calls")
    return [*turn, calls] if calls else turn


def _hash(value: Any) -> str:
    return digest_of(value)[:_HASH_LENGTH]
