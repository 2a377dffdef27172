"""Language modelling: plain texts and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.contracts.format import Column, Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, passage_of
from posttrain_plugins.data.formats.schema import speaks_openai


class Text(Format):
    """A text, all of which is learned."""

    columns = ("text",)

    def problem(self, row: Row) -> str | None:
        """Refuse what is no text."""
        return values.first_problem(row, {"text": values.text})

    def passages(self, row: Row) -> Sequence[Passage]:
        """The text, which stands alone."""
        return (Passage("completion", None, row["text"]),)


class Messages(Format):
    """A conversation of which every assistant turn is learned, save those with `weight: 0`."""

    columns = ("messages",)
    optional = OPTIONAL
    conversions = {
        "prompt_completion": conversions.last_answer,
        "prompt": conversions.before_last_answer,
    }

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """A column `messages`, without what only OpenAI's files have."""
        return "messages" in schema and not speaks_openai(schema)

    def problem(self, row: Row) -> str | None:
        """Refuse what is no conversation."""
        return values.first_problem(row, {"messages": values.messages}) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The whole conversation, which stands alone."""
        return (passage_of(row, "completion", None, row["messages"]),)
