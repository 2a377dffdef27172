"""The stage `evaluate.steps`: how often process reward models judge steps as their labels do."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Finding, Inputs, Port
from posttrain_plugins.evaluation.reporting import ReportOptions, ReportStage
from posttrain_plugins.rewards.step_options import unseparated


class StepsConfig(ReportOptions):
    """Options of `evaluate.steps`."""

    step_separator: str | None = Field(
        default=None,
        description="what ends every step that is a string; unset: what the model was trained with",
    )


class Steps(ReportStage):
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

    def check(self, config: StepsConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a model of which nothing tells what ended its steps."""
        for model in inputs.get("models", ()):
            yield from unseparated(model, config.step_separator, "evaluate", "models")
