"""From one canonical format to another, in as few conversions as there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.contracts.format import Conversion, Format, Row
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages, completion_messages
from posttrain_plugins.data.formats import conversions, three_way
from posttrain_plugins.data.formats.nicknames import meant
from posttrain_plugins.data.formats.values import listed

_EVERY: Mapping[tuple[str, str], Conversion] = {
    ("messages", "prompt_completion"): conversions.every_answer,
    ("messages", "prompt"): conversions.every_prompt,
}
"""What is done instead where every answer of a conversation is to become a row."""
_ANSWERS = ("completion", "chosen", "rejected")
"""Columns that are answers in whichever format has them."""


@dataclass(frozen=True)
class Route:
    """Conversions, one after the other.

    Args:
        formats: The formats on the way, the first and the last included.
        steps: A conversion from each to the next.
    """

    formats: tuple[str, ...]
    steps: tuple[Conversion, ...]

    def rows(self, row: Row) -> Iterable[Row]:
        """Return what a row becomes."""
        found: Iterable[Row] = (row,)
        for step in self.steps:
            found = [made for each in found for made in step(each)]
        return found


def route(formats: Mapping[str, Format], source: str, target: str, *, every_answer: bool = False) -> Route:
    """Find the shortest way.

    Args:
        formats: The canonical formats by name.
        source: What the rows are.
        target: What they are to become.
        every_answer: Make a row of every answer of a conversation rather than of its last one.

    Raises:
        DataError: There is none.
    """
    ways: dict[str, Route] = {source: Route((source,), ())}
    waiting = [source]
    while waiting and target not in ways:
        way = ways[waiting.pop(0)]
        last = way.formats[-1]
        for name, step in (formats[last].conversions if last in formats else {}).items():
            if name in ways:
                continue
            chosen = _EVERY.get((last, name), step) if every_answer else step
            ways[name] = Route((*way.formats, name), (*way.steps, chosen))
            waiting.append(name)
    if target not in ways:
        misnamed = None if target in formats else meant(target, tuple(formats))
        raise DataError(
            f"there is no format `{target}`"
            if misnamed
            else f"`{source}` rows do not become `{target}` rows",
            expected=f"one of {listed(_reachable(formats, source))}",
            fix=misnamed or "rows lack what the other format needs; another stage has to make it",
        )
    return ways[target]


def with_turns(row: Row) -> dict[str, Any]:
    """Return a row of any canonical format whose strings are turns: a prompt the user's, an answer the assistant's."""
    made = dict(row)
    if isinstance(row.get("prompt"), str):
        made["prompt"] = as_messages(row["prompt"])
    # A lone `gold` travels along with rows of other formats.
    for column in {*_ANSWERS, *three_way.ANSWERS} if row.keys() >= {*three_way.ANSWERS} else _ANSWERS:
        if isinstance(row.get(column), str):
            made[column] = completion_messages(row[column])
    return made


def _reachable(formats: Mapping[str, Format], source: str) -> list[str]:
    found = [source]
    for name in found:
        onward = formats[name].conversions if name in formats else {}
        found.extend(each for each in onward if each not in found)
    return found[1:]
