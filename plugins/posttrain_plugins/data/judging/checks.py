"""What may be wrong with single rows that suit their format, each check by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.contracts.format import Row
from posttrain.contracts.passage import Passage, Turns
from posttrain.contracts.stage import Level
from posttrain_plugins.data.conversation import content_text, empty_answer
from posttrain_plugins.data.formats.values import MARGIN, WEIGHT, margin_problem, weight_problem
from posttrain_plugins.data.judging.flaws import flaws_of, turned_round, unused_system

Find = Callable[[Row, Sequence[Passage]], str | None]
"""Says what is odd about a row, given its passages, or returns None."""

CONTROL = re.compile(
    r"<\|[A-Za-z0-9_▁\-]{2,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
    r"|<｜[^｜]{2,40}｜>|\[(?:AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT)\]"
)
"""What tokenizers of common models read as control tokens wherever it stands."""
_STRAY = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]")
_EDGE = re.compile(r"^\s|\s$")
_SHOWN = 60


@dataclass(frozen=True)
class Check:
    """One thing to look for.

    Args:
        title: What is wrong with rows that have it.
        level: How much that matters.
        find: Looks at a row.
        fix: What to do about it.
        fix_for: What to do about a row, where that depends on its columns.
    """

    title: str
    level: Level
    find: Find
    fix: str
    fix_for: Callable[[Row], str] | None = None


def texts(passages: Sequence[Passage]) -> Iterator[tuple[str, str]]:
    """Yield what is said in passages with who says it: a role, or the side of a plain text."""
    for passage in passages:
        for side, part in (("prompt", passage.prompt), (passage.role, passage.completion)):
            if isinstance(part, str):
                yield side, part
            elif part is not None:
                yield from ((str(message["role"]), content_text(message)) for message in part)


def turns(passage: Passage) -> list[Mapping[str, Any]]:
    """Return the messages of a passage; plain texts have none."""
    parts = (passage.prompt, passage.completion)
    return [message for part in parts if part is not None and not isinstance(part, str) for message in part]


def _identical(row: Row, passages: Sequence[Passage]) -> str | None:
    if "gold" in row and row["gold"] == row.get("rejected"):
        return "gold and rejected are the same"
    return "chosen and rejected are the same" if "identical_pairs" in _flaws(row) else None


def _inverted(row: Row, passages: Sequence[Passage]) -> str | None:
    return "the rejected side has the better score" if "inverted_pairs" in _flaws(row) else None


def _flaws(row: Row) -> tuple[str, ...]:
    return tuple(flaws_of(row, "preference")) if "chosen" in row and "rejected" in row else ()


def _without_answer(row: Row, passages: Sequence[Passage]) -> str | None:
    lacking = any(
        not isinstance(each.completion, str | None) and not _answers(each.completion) for each in passages
    )
    return "no assistant turn" if lacking else None


def _empty_answer(row: Row, passages: Sequence[Passage]) -> str | None:
    for passage in passages:
        number = empty_answer(passage.completion)
        if number is not None:
            return f"answer {number} is empty"
    return None


def _answers(part: Turns | None) -> list[Mapping[str, Any]]:
    if part is None or isinstance(part, str):
        return []
    return [message for message in part if message["role"] == "assistant"]


def _roles(row: Row, passages: Sequence[Passage]) -> str | None:
    for passage in passages:
        found = [str(message["role"]) for message in turns(passage)]
        for number, role in enumerate(found):
            before = found[number - 1] if number else None
            if role in ("user", "assistant") and role == before:
                return f"message {number + 1} is the second `{role}` turn in a row"
            if role == "system" and number:
                return f"message {number + 1} is a `system` turn"
        if found and found[0] == "assistant" and passage.prompt is None:
            return "the conversation begins with the assistant"
    return None


def _tools(row: Row, passages: Sequence[Passage]) -> str | None:
    for passage in passages:
        waiting = 0
        for number, message in enumerate(turns(passage), 1):
            if message["role"] == "tool":
                if waiting < 1:
                    return f"message {number} is a tool's result that nothing called for"
                waiting -= 1
            elif waiting:
                return f"message {number} follows {waiting} tool call(s) without a result"
            else:
                waiting = len(message.get("tool_calls") or ())
    return None


def _unknown_tools(row: Row, passages: Sequence[Passage]) -> str | None:
    for passage in passages:
        known = {_name(tool) for tool in passage.tools or ()}
        called = {_name(call) for message in turns(passage) for call in message.get("tool_calls") or ()}
        if called - known:
            return f"calls `{sorted(map(str, called - known))[0]}`, which is not among the row's tools"
    return None


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return str((function if isinstance(function, Mapping) else tool).get("name"))


def _control(row: Row, passages: Sequence[Passage]) -> str | None:
    return _first(CONTROL, passages, "holds")


def _stray(row: Row, passages: Sequence[Passage]) -> str | None:
    return _first(_STRAY, passages, "holds")


def _first(pattern: re.Pattern[str], passages: Sequence[Passage], verb: str) -> str | None:
    for who, text in texts(passages):
        found = pattern.search(text)
        if found:
            return f"{who} {verb} {found.group()[:_SHOWN]!a} at character {found.start() + 1}"
    return None


def _edges(row: Row, passages: Sequence[Passage]) -> str | None:
    for passage in passages:
        part = passage.completion
        answers = [part] if isinstance(part, str) else [content_text(each) for each in _answers(part)]
        for text in answers:
            if passage.prompt is not None and text.strip() and _EDGE.search(text):
                return f"{passage.role} begins or ends with white space"
    return None


def _system(row: Row, passages: Sequence[Passage]) -> str | None:
    column = unused_system(row)
    return f"`{column}` travels along unused" if column else None


def longer_than(limit: int) -> Check:
    """Return the check for rows with more characters than `limit`."""

    def find(row: Row, passages: Sequence[Passage]) -> str | None:
        most = max(sum(len(text) for _, text in texts((each,))) for each in passages)
        return f"{most} characters" if most > limit else None

    return Check(
        f"longer than {limit} characters",
        Level.WARNING,
        find,
        "a trainer's `max_length` cuts or drops them; split such rows, or drop them",
    )


def weights_in(column: str | None) -> Check:
    """Return the check for weights that no trainer takes.

    Args:
        column: What holds the rows' weights, which every row needs then; None looks at numbers in a column that is
            called `weight`.
    """

    def find(row: Row, passages: Sequence[Passage]) -> str | None:
        if column is None and not isinstance(row.get(WEIGHT), int | float):
            return None
        return weight_problem(row, column or WEIGHT)

    return Check(
        "weights that are no finite numbers of at least 0, which a trainer's `weight_column` refuses",
        Level.WARNING if column is None else Level.ERROR,
        find,
        "give such rows a weight of at least 0; 0 leaves a row out. Of text in CSV files, name the column in "
        "`json_columns` of `data.load`",
    )


def _margins(row: Row, passages: Sequence[Passage]) -> str | None:
    compared = "gold" not in row and not row.keys().isdisjoint({"rejected", "score", "scores"})
    return margin_problem(row) if compared else None


CHECKS: Mapping[str, Check] = {
    "margins": Check(
        "margins that no reward model takes: negative, not finite, no numbers",
        Level.WARNING,
        _margins,
        f"mend them for losses that read margins, or rename the column: `columns: {{{MARGIN}: OTHER}}`",
    ),
    "identical-pair": Check(
        "answers that are to be told apart are the same", Level.WARNING, _identical, "drop them"
    ),
    "inverted-pair": Check(
        "a pair is ranked against its own scores",
        Level.WARNING,
        _inverted,
        "swap the sides with `columns`, and the columns of their scores with them",
        lambda row: f"swap them and their scores: {turned_round(row)}",
    ),
    "no-answer": Check("a conversation without an answer", Level.WARNING, _without_answer, "drop them"),
    "empty-answer": Check(
        "an answer is empty: the model learns to end at once", Level.WARNING, _empty_answer, "drop them"
    ),
    "roles": Check(
        "roles that many chat templates refuse or rewrite",
        Level.WARNING,
        _roles,
        "merge turns of the same speaker, and put `system` first",
    ),
    "tool-results": Check(
        "tool calls and results do not match", Level.WARNING, _tools, "complete the conversations"
    ),
    "unknown-tool": Check(
        "a call of a tool that the row does not offer",
        Level.WARNING,
        _unknown_tools,
        "give the row its `tools`",
    ),
    "control-token": Check(
        "text that tokenizers read as control tokens",
        Level.WARNING,
        _control,
        "remove it, or the model is shown turns that nobody wrote",
    ),
    "stray-character": Check(
        "control characters, or signs of a broken encoding", Level.WARNING, _stray, "decode the source anew"
    ),
    "unused-system": Check(
        "a system prompt in a column of its own, which no turn is made of",
        Level.WARNING,
        _system,
        "put it into the messages as a `system` turn, or name the column otherwise",
    ),
    "edge-space": Check(
        "answers with white space at their edges, which many templates trim",
        Level.NOTE,
        _edges,
        "strip them where the space means nothing",
    ),
}
"""The checks by name, which `data.validate` can leave out."""
