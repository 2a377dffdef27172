"""Stepwise supervision: an answer in steps, each of them judged.

Lightman et al., "Let's Verify Step by Step", arXiv 2305.20050.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from posttrain.contracts.format import Format, Row
from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import conversions, values
from posttrain_plugins.data.formats.passages import OPTIONAL, extras_problem, passage_of


class Stepwise(Format):
    """A prompt with the steps of an answer and a label for each: true or false, or a probability that it is right.

    The steps are strings, or lists of messages each beginning with an assistant turn.
    """

    columns = ("prompt", "completions", "labels")
    optional = OPTIONAL
    conversions = {
        "unpaired_preference": conversions.steps_together,
        "prompt_completion": conversions.right_steps,
        "prompt": conversions.prompt_alone,
    }

    def problem(self, row: Row) -> str | None:
        """Refuse steps without labels, labels without steps, and labels that are no probability."""
        problem = values.first_problem(row, {"prompt": values.turns, "completions": _steps})
        if problem:
            return problem
        return labels_problem(row) or extras_problem(row)

    def passages(self, row: Row) -> Sequence[Passage]:
        """The prompt with all steps as one answer; `in_steps` tells where each ends."""
        return (
            passage_of(
                row, "completion", row["prompt"], conversions.whole(row["prompt"], row["completions"])
            ),
        )


def in_steps(row: Row) -> Passage:
    """Return a row's prompt with its answer and where each step of it ends; strings are put together as they are.

    Raises:
        DataError: Something beside the texts, such as `tools`, is malformed.
    """
    prompt, steps = row["prompt"], row["completions"]
    ends = tuple(accumulate(map(len, steps)))
    if isinstance(steps[0], str):
        return replace(passage_of(row, "completion", prompt, None), completion="".join(steps), steps=ends)
    messages = [message for step in steps for message in step]
    return replace(passage_of(row, "completion", prompt, messages), steps=ends)


def labels_problem(row: Row) -> str | None:
    """Say what is wrong with the labels of a row whose steps are a list, or return None."""
    problem = values.first_problem(row, {"labels": _labels})
    if problem:
        return problem
    steps, labels = len(row["completions"]), len(row["labels"])
    return None if steps == labels else f"`labels` has {labels} entries for {steps} `completions`"


def _steps(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"is {values.type_name(value) or 'null'}, not a list of steps"
    if not value:
        return "is an empty list"
    for number, step in enumerate(value, 1):
        problem = values.answer(step)
        if problem:
            return f"step {number} {problem}"
        if isinstance(step, str) != isinstance(value[0], str):
            return f"step {number} is a {values.type_name(step)}, but step 1 a {values.type_name(value[0])}"
    return None


def _labels(value: Any) -> str | None:
    return values.entries(value, "labels", values.probability)
