"""The stage `evaluate.preferences`: how often reward models prefer the better answer, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Inputs, Port, Prediction, Stage, StageConfig, VolatileMark
from posttrain_plugins.evaluation.report import reported


class PreferencesConfig(StageConfig):
    """Options of `evaluate.preferences`."""

    limit: int | None = Field(
        default=None, ge=1, description="evaluate this many rows, chosen by their content"
    )
    seed: int = Field(default=0, ge=0, description="which rows `limit` chooses")
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class Preferences(Stage):
    """Scores both answers of preference pairs with reward models; `gate` judges the report by `pair_accuracy`."""

    config = PreferencesConfig
    inputs = (
        Port("models", frozenset({Kind.REWARD_MODEL}), many=True),
        Port("data", frozenset({Kind.DATASET}), formats=frozenset({"preference"})),
    )
    target = "posttrain_plugins.evaluation.pairs:run"
    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {"limit": 16}

    def outputs(self, config: PreferencesConfig) -> tuple[Port, ...]:
        """Return the report."""
        return (Port("report", frozenset({Kind.REPORT})),)

    def predict(self, config: PreferencesConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict whom the report will be about, where that is known."""
        return {"report": Prediction(Kind.REPORT, reported(inputs.get("models", ())))}
