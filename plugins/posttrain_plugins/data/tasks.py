"""Dataset rows as tasks: what a policy is asked, and what it should answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import (
    Turns,
    as_messages,
    completion_messages,
    content_text,
    tools_of,
)
from posttrain_plugins.data.formats.passages import arguments_of
from posttrain_plugins.data.rows import before_last_answer, prompt_hash

FORMATS = frozenset({"prompt", "prompt_completion", "messages"})
"""The dataset formats that ask a policy something."""

_IDENTITY = 16


@dataclass(frozen=True)
class Task:
    """One row to answer.

    Args:
        identity: A hash of the row's content, numbered where the same row occurs again.
        prompt: What the policy is asked: a plain string, or messages.
        completion: The reference answer in the row, if its format has one; messages when the prompt is
            messages.
        hash: The prompt's hash, as in the dataset's `prompts.txt`.
        row: The whole row.
    """

    identity: str
    prompt: Turns
    completion: Turns | None
    hash: str
    row: Mapping[str, Any]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the policy may call."""
        return tools_of(self.row)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the row gives the chat template besides, as training does."""
        return arguments_of(self.row)

    def answer(self) -> str:
        """Return the text of the reference answer.

        Raises:
            DataError: The reference is more than one assistant turn.
        """
        turns = completion_messages(self.completion or "")
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise DataError(
                "a reference answer must be one assistant turn",
                where=f"row {self.identity}",
                found="turns " + ", ".join(str(turn["role"]) for turn in turns),
                fix="name a column that holds the answer as text with `answer_column`",
            )
        return content_text(turns[0])


def tasks_of(rows: Sequence[Mapping[str, Any]], format: str, limit: int | None, seed: int) -> list[Task]:
    """Turn rows into tasks, at most `limit` of them.

    Which rows the limit keeps depends on their content and the seed, not on their order in the file; those
    kept stay in their order.

    Raises:
        DataError: A conversation does not end with an answer.
    """
    chosen = chosen_rows(rows, limit, seed)
    return [_task(row, format, identity) for identity, row in chosen.items()]


def chosen_rows(
    rows: Sequence[Mapping[str, Any]], limit: int | None, seed: int
) -> dict[str, Mapping[str, Any]]:
    """Return rows by a hash of their content, numbered where the same row occurs again; at most `limit` of them."""
    named = dict(zip(_identities(rows), rows, strict=True))
    if limit is None or limit >= len(named):
        return named
    kept = set(sorted(named, key=lambda identity: digest_of([seed, identity]))[:limit])
    return {identity: row for identity, row in named.items() if identity in kept}


def _identities(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for row in rows:
        digest = digest_of(row)[:_IDENTITY]
        seen[digest] += 1
        found.append(digest if seen[digest] == 1 else f"{digest}#{seen[digest]}")
    return found


def _task(row: Mapping[str, Any], format: str, identity: str) -> Task:
    prompt, completion = _PARTS[format](row)
    if completion is not None and not (isinstance(prompt, str) and isinstance(completion, str)):
        # A chat answer needs the prompt as a chat too, or the policy would be asked something else than it is
        # scored on.
        prompt, completion = as_messages(prompt), completion_messages(completion)
    return Task(identity, prompt, completion, prompt_hash(row, format), row)


def _from_messages(row: Mapping[str, Any]) -> tuple[Turns, Turns | None]:
    messages = row["messages"]
    prompt = before_last_answer(messages)
    if not prompt or len(prompt) != len(messages) - 1:
        raise DataError(
            "this conversation does not end with an assistant turn that answers something",
            found="turns " + ", ".join(str(message.get("role")) for message in messages),
            fix="drop the row, or cut it after an assistant turn",
        )
    return prompt, messages[-1:]


_PARTS = {
    "prompt": lambda row: (row["prompt"], None),
    "prompt_completion": lambda row: (row["prompt"], row["completion"]),
    "messages": _from_messages,
}
