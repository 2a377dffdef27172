"""What the stages that evaluate models share: their options, their ports and how a report comes about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.artifacts.kinds import Kind, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Inputs, Port, Prediction, Stage, StageConfig, StageContext, VolatileMark
from posttrain_plugins.evaluation.report import (
    Item,
    Metric,
    named_figures,
    reported,
    unanswered,
    write_report,
)
from posttrain_plugins.evaluation.scores import Estimate
from posttrain_plugins.stopping import pauses

Progress = Callable[[int, int], None]
"""Told how much of a pass is done, and how much there is."""
Figures = Mapping[str, Mapping[Metric, Estimate]]
"""Estimates by model and metric."""


class ReportOptions(StageConfig):
    """Which rows are evaluated, and how many at a time."""

    limit: int | None = Field(
        default=None, ge=1, description="evaluate this many rows, chosen by their content"
    )
    seed: int = Field(default=0, ge=0, description="which rows `limit` chooses")
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class ReportStage(Stage):
    """Base of stages with ports `models` and `data` that put out one report."""

    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {"limit": 16}

    def outputs(self, config: Any) -> tuple[Port, ...]:
        """Return the report."""
        return (Port("report", frozenset({Kind.REPORT})),)

    def predict(self, config: Any, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict whom the report will be about, where that is known."""
        return {"report": Prediction(Kind.REPORT, reported(inputs.get("models", ())))}


def items_of(
    context: StageContext,
    judge: Callable[[Artifact, Sequence[Progress]], Iterable[Item]],
    unit: str,
    passes: int = 1,
) -> list[Item]:
    """Evaluate one model after the other, each once.

    Args:
        context: Of the stage; its progress counts the passes of all models.
        judge: Evaluates a model, and tells how far each of its passes is.
        unit: What is counted.
        passes: Passes over the rows that a model takes.

    Raises:
        Interrupted: The stage was asked to stop.
    """
    models = list({model.digest: model for model in context.inputs["models"]}.values())
    items: list[Item] = []
    for number, model in enumerate(models):
        first, total = number * passes, len(models) * passes
        items += judge(model, [_progress(context, first + each, total, unit) for each in range(passes)])
    return items


def _progress(context: StageContext, offset: int, passes: int, unit: str) -> Progress:
    pause = pauses(context, unit, "the evaluation")
    return lambda done, total: pause(offset * total + done, passes * total)


def put_out(context: StageContext, items: Sequence[Item], metrics: Sequence[Metric]) -> Figures:
    """Write the report and describe it; return its figures by model."""
    data = context.input("data")
    figures = write_report(context.output("report"), items, metrics, data.digest)
    facts = ReportFacts(
        report="evaluation",
        figures=named_figures(figures),
        subjects=tuple(figures),
        data=data.digest,
        unanswered=unanswered(items),
    )
    context.describe("report", Kind.REPORT, facts)
    return figures


def shares_told(figures: Figures, unit: str = "") -> str:
    """Return each share with its interval, as a summary has them."""
    return ", ".join(
        f"{value.value:.4g} [{value.low:.3g}, {value.high:.3g}] of {value.count}{unit}"
        for own in figures.values()
        for value in own.values()
    )
