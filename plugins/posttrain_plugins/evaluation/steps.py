"""The stage `evaluate.steps`: how often process reward models judge steps as their labels do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import (
    Finding,
    Inputs,
    Level,
    Port,
    Prediction,
    Stage,
    StageConfig,
    VolatileMark,
)
from posttrain_plugins.evaluation.report import reported
from posttrain_plugins.handoffs.lineage import certainty


class StepsConfig(StageConfig):
    """Options of `evaluate.steps`."""

    step_separator: str | None = Field(
        default=None,
        description="what ends every step that is a string; unset: what the model was trained with",
    )
    limit: int | None = Field(
        default=None, ge=1, description="evaluate this many rows, chosen by their content"
    )
    seed: int = Field(default=0, ge=0, description="which rows `limit` chooses")
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class Steps(Stage):
    """Judges the steps of answers with process reward models; `gate` judges the report by `step_accuracy`.

    A step counts as right where the odds are on the side of its label; a label of one half has no side. Steps of one
    answer depend on each other, so the intervals are taken over answers.
    """

    config = StepsConfig
    inputs = (
        Port("models", frozenset({Kind.PROCESS_REWARD_MODEL}), many=True),
        Port("data", frozenset({Kind.DATASET}), formats=frozenset({"stepwise"})),
    )
    target = "posttrain_plugins.evaluation.step_judging:run"
    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {"limit": 16}

    def outputs(self, config: StepsConfig) -> tuple[Port, ...]:
        """Return the report."""
        return (Port("report", frozenset({Kind.REPORT})),)

    def predict(self, config: StepsConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict whom the report will be about, where that is known."""
        return {"report": Prediction(Kind.REPORT, reported(inputs.get("models", ())))}

    def check(self, config: StepsConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a model of which nothing tells what ended its steps."""
        for model in inputs.get("models", ()):
            scores = model.facts.scores
            if config.step_separator is None and scores is not None and scores.separator is None:
                yield Finding(
                    "evaluate",
                    Level.ERROR,
                    certainty(model),
                    f"{model.origin} does not say what ended the steps that it was trained on",
                    port="models",
                    fix="name it in `step_separator`",
                )
