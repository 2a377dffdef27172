"""Pairs beside a gold answer, for triple preference optimization (arXiv 2405.16681)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from posttrain.contracts.format import Column, Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, others, passage_of
from posttrain_plugins.data.formats.schema import begins_with_prompt, holds

GOLD = "gold"
ANSWERS = ("chosen", "rejected", GOLD)


def _pair(row: Row) -> Iterable[Row]:
    return (others(row, GOLD),)


def _gold_alone(row: Row) -> Iterable[Row]:
    return (others(row, *ANSWERS) | {"completion": row[GOLD]},)


def _gold_joined(row: Row) -> Iterable[Row]:
    return [each for alone in _gold_alone(row) for each in conversions.joined(alone)]


def _prompt(row: Row) -> Iterable[Row]:
    return (others(row, *ANSWERS),)


class ThreeWay(Format):
    """A prompt with a better and a worse completion, and one that is to be learned."""

    columns = ("prompt", *ANSWERS)
    optional = OPTIONAL
    conversions = {
        "preference": _pair,
        "prompt_completion": _gold_alone,
        "messages": _gold_joined,
        "prompt": _prompt,
    }

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """The four columns, where all answers begin with the answer and the gold one is one."""
        whole = super().fits(schema) and holds(schema, GOLD, "string", "list")
        return whole and not any(begins_with_prompt(schema, answer) for answer in ANSWERS)

    def problem(self, row: Row) -> str | None:
        """Refuse an empty answer, and one that repeats the prompt."""
        judges = {"prompt": values.turns, **dict.fromkeys(ANSWERS, values.answer)}
        return values.first_problem(row, judges) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The better answer, the worse one, then the gold one."""
        return tuple(passage_of(row, answer, row["prompt"], row[answer]) for answer in ANSWERS)
