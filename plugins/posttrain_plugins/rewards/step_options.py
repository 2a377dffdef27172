"""What stages and rewards that ask a process reward model about steps have in common: options and their check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.stage import Finding, Input, Level, VolatileMark
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.rewards.aggregation import Aggregation
from posttrain_plugins.rewards.steps import Style


class StepOptions(Config):
    """How steps are found in an answer, and how what is said of them makes one number."""

    aggregation: Aggregation = Field(
        default="min",
        description="how the steps make up the number: the least likely one, the product (that all are right), its "
        "logarithm in nats, the mean, or the last one",
    )
    style: Style | None = Field(
        default=None,
        description="how steps are told in a text: `\\item`s, `Step 1:`, `1.`, paragraphs or lines; unset: the first "
        "of these that finds more than one. What is in steps already is taken as it is",
    )
    step_separator: str | None = Field(
        default=None,
        description="what ends every step that is a string; unset: what the model was trained with",
    )
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


def unseparated(model: Input, separator: str | None, code: str, port: str) -> Iterator[Finding]:
    """Yield the finding about a model of which nothing tells what ended its steps.

    Args:
        model: A process reward model.
        separator: What the options say, or None.
        code: Of the finding.
        port: That the model is connected to.
    """
    scores = model.facts.scores
    if separator is None and scores is not None and scores.separator is None:
        message = f"{model.origin} does not say what ended the steps that it was trained on"
        fix = "name it in `step_separator`"
        yield Finding(code, Level.ERROR, certainty(model), message, port=port, fix=fix)
