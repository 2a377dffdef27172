"""The stage `evaluate`: greedy answers and likelihoods of one or several policies, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.contracts.stage import Finding, Input, Inputs, Level, Port
from posttrain_plugins.data.tasks import FORMATS
from posttrain_plugins.evaluation.report import Metric
from posttrain_plugins.evaluation.reporting import ReportOptions, ReportStage
from posttrain_plugins.handoffs.lineage import certainty

DEFAULT_ANSWER = "answer"
"""The column that holds the answer of data in the format `prompt`, when none is named."""


class EvaluateConfig(ReportOptions):
    """Options of `evaluate`."""

    metrics: tuple[Literal[Metric.EXACT_MATCH, Metric.PERPLEXITY], ...] = Field(
        default=(Metric.EXACT_MATCH,),
        min_length=1,
        description="what to measure: `exact_match` is the share of rows whose greedy answer ends by itself "
        "and equals the reference, white space at the ends aside; `perplexity` is that of the "
        "reference completion per token; of a conversation, the last assistant turn counts",
    )
    answer_column: str | None = Field(
        default=None,
        description="the column with the reference text; by default the completion, or `answer` in format "
        "`prompt`",
    )
    max_new_tokens: int = Field(default=128, ge=1, description="longest generated answer")

    @model_validator(mode="after")
    def _metrics_differ(self) -> Self:
        if len(set(self.metrics)) != len(self.metrics):
            raise ValueError("`metrics` names a metric twice")
        return self

    def answer_from(self, format: str | None) -> str | None:
        """Return the column that holds the reference text; None for the completion."""
        return DEFAULT_ANSWER if self.answer_column is None and format == "prompt" else self.answer_column


class Evaluate(ReportStage):
    """Evaluates policies on a dataset that none of them may have been trained on."""

    config = EvaluateConfig
    inputs = (
        Port("models", POLICY, many=True),
        Port("data", frozenset({Kind.DATASET}), formats=FORMATS),
    )
    target = "posttrain_plugins.evaluation.measure:run"
    tiny: ClassVar[Mapping[str, Any]] = {"limit": 16, "max_new_tokens": 16}

    def check(self, config: EvaluateConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report metrics that the data cannot give and answers that do not fit the models' context."""
        for data in inputs.get("data", ()):
            yield from _unmeasurable(config, data)
        if Metric.EXACT_MATCH not in config.metrics:
            return
        for model in inputs.get("models", ()):
            context = model.facts.context
            if context is not None and config.max_new_tokens >= context:
                yield _finding(
                    model,
                    "models",
                    f"`max_new_tokens` {config.max_new_tokens} leaves no room for a prompt in the context of "
                    f"{model.origin}, {context} tokens",
                    "lower `max_new_tokens`",
                )


def _unmeasurable(config: EvaluateConfig, data: Input) -> Iterable[Finding]:
    format, columns = data.facts.format, data.facts.columns
    if format == "prompt" and Metric.PERPLEXITY in config.metrics:
        yield _finding(
            data,
            "data",
            f"perplexity needs completions, but {data.origin} has the format `prompt`",
            "use data in the format `prompt_completion` or `messages`, or leave out `perplexity`",
        )
    column = config.answer_from(format)
    if (
        Metric.EXACT_MATCH in config.metrics
        and column is not None
        and columns is not None
        and column not in columns
    ):
        yield _finding(
            data,
            "data",
            f"{data.origin} has no column `{column}` to compare answers with; it has {', '.join(columns)}",
            "name the column with `answer_column`",
        )


def _finding(source: Input, port: str, message: str, fix: str) -> Finding:
    return Finding("evaluate", Level.ERROR, certainty(source), message, port=port, fix=fix)
