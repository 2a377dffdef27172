"""A prompt, alone or with the completion to learn; strings or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.contracts.format import Column, Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, passage_of

_ANSWERS = frozenset({"completions", "chosen", "rejected"})
"""Columns that belong to answers: beside a prompt alone they are what is left of another format."""


class Prompt(Format):
    """What a policy is asked."""

    columns = ("prompt",)
    optional = OPTIONAL

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """A column `prompt`, and no answers that lack something, such as steps without their labels."""
        return super().fits(schema) and _ANSWERS.isdisjoint(schema)

    def problem(self, row: Row) -> str | None:
        """Refuse an empty or malformed prompt."""
        return values.first_problem(row, {"prompt": values.turns}) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The prompt without a completion."""
        return (passage_of(row, "completion", row["prompt"], None),)


class PromptCompletion(Format):
    """A prompt and the completion to learn."""

    columns = ("prompt", "completion")
    optional = OPTIONAL
    conversions = {"messages": conversions.joined, "prompt": conversions.prompt_alone}

    def problem(self, row: Row) -> str | None:
        """Refuse an empty side, and a completion that repeats the prompt."""
        judges = {"prompt": values.turns, "completion": values.answer}
        return values.first_problem(row, judges) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The pair."""
        return (passage_of(row, "completion", row["prompt"], row["completion"]),)
