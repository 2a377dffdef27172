"""Preferences: two completions of a prompt, or one that is good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.contracts.format import Column, Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, passage_of
from posttrain_plugins.data.formats.scalars import truth_in
from posttrain_plugins.data.formats.schema import begins_with_prompt

SIDES = ("chosen", "rejected")
AS_TRUTH = (
    'row["label"] = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}'
    '[str(row["label"]).strip().lower()]'
)
"""Makes truth values of all that spells one, and stops at what does not: a guess would call good answers bad."""


class Preference(Format):
    """A prompt with a better and a worse completion."""

    columns = ("prompt", *SIDES)
    optional = OPTIONAL
    scalars = {values.MARGIN: float}
    conversions = {
        "unpaired_preference": conversions.both_sides,
        "prompt_completion": conversions.chosen_alone,
        "messages": conversions.chosen_joined,
        "prompt": conversions.prompt_alone,
    }

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """The three columns, where both sides begin with the answer."""
        return super().fits(schema) and not any(begins_with_prompt(schema, side) for side in SIDES)

    def problem(self, row: Row) -> str | None:
        """Refuse an empty side, and one that repeats the prompt; a margin is judged by the losses that read it."""
        judges = {"prompt": values.turns, "chosen": values.answer, "rejected": values.answer}
        return values.first_problem(row, judges) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The better answer, then the worse one."""
        return tuple(passage_of(row, side, row["prompt"], row[side]) for side in SIDES)


class UnpairedPreference(Format):
    """A prompt with a completion that is good (`label: true`) or bad."""

    columns = ("prompt", "completion", "label")
    optional = OPTIONAL
    scalars = {"label": bool}
    conversions = {
        "prompt_completion": conversions.good_alone,
        "messages": conversions.good_joined,
        "prompt": conversions.prompt_alone,
    }

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """A `label` of true and false; one of other words is a column that travels along.

        Numbers and texts that spell a truth value are taken for labels too, to be read or refused: 0 and 1 must not
        turn bad answers into demonstrations.
        """
        if not super().fits(schema):
            return False
        label = schema["label"]
        return label.truths > 0 or not label.types.keys().isdisjoint({"boolean", "number"})

    def problem(self, row: Row) -> str | None:
        """Refuse an empty side and a label that is neither true nor false."""
        judges = {"prompt": values.turns, "completion": values.answer}
        return values.first_problem(row, judges) or label_problem(row) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The pair; the label is the trainer's business."""
        return (passage_of(row, "completion", row["prompt"], row["completion"]),)


def label_problem(row: Row) -> str | None:
    """Say what is wrong with the label of a row, or return None."""
    problem = values.first_problem(row, {"label": values.truth})
    value = row.get("label")
    if not problem or value is None:
        return problem
    spelled = truth_in(str(value)) is not None or value in (0, 1)
    write = (
        f"true or false (in Python: `{AS_TRUTH}`)"
        if spelled
        else "true for a good answer, false for a bad one"
    )
    return f"{problem}; write {write}, or choose `format: prompt_completion` where it is no verdict on the completion"
