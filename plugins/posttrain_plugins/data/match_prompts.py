"""The stage `data.match_prompts`: weights by which bad answers count as if they were to the good answers' prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import POLICY, Kind
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
from posttrain_plugins.data.derivation import expected
from posttrain_plugins.data.rows import SHARED
from posttrain_plugins.handoffs.lineage import certainty

FORMAT = "unpaired_preference"


class MatchPromptsConfig(StageConfig):
    """How prompts are told apart, and how far weights may go."""

    column: str = Field(default="weight", min_length=1, description="column that the weights are written to")
    min_ratio: float = Field(default=0.5, ge=0, description="least weight of a row")
    max_ratio: float = Field(default=10.0, gt=0, description="largest weight of a row")
    sample: int = Field(
        default=1024,
        ge=2,
        description="rows of each side that the classifier is fitted to, drawn by the seed",
    )
    seed: int = Field(default=42, ge=0, lt=2**32, description="seed of that draw")
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="last tokens of a prompt that count; unset: what the model can take",
    )
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=4096, ge=1, description="tokens, padding included, of one forward pass"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ratio >= self.max_ratio:
            raise ValueError("min_ratio must be below max_ratio")
        return self


class MatchPrompts(Stage):
    """Weigh bad answers by how likely their prompts are among those of the good answers.

    Where good and bad answers were collected from different prompts, a loss over single answers learns to tell the
    prompts apart. A classifier, fitted to what a model makes of prompts (the mean of its last hidden states), says how
    likely a prompt has a good answer, p; a bad answer's weight is p / (1 − p), within bounds, and a good one's is 1.
    That is underlying distribution matching of Jung et al. 2024 (https://arxiv.org/abs/2404.04656). Training takes the
    column with `weight_column`.
    """

    config = MatchPromptsConfig
    shared = SHARED
    inputs = (
        Port("data", frozenset({Kind.DATASET}), formats=frozenset({FORMAT})),
        Port("model", POLICY),
    )
    target = "posttrain_plugins.data.similarity.prompt_classes:run"
    preload = ("torch", "transformers")

    def outputs(self, config: MatchPromptsConfig) -> tuple[Port, ...]:
        """Put out the rows with their weights."""
        return (Port("data", frozenset({Kind.DATASET}), formats=frozenset({FORMAT})),)

    def predict(self, config: MatchPromptsConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the rows, with one more column."""
        source = inputs["data"][0]
        columns = source.facts.columns
        update = {
            "rows": source.facts.rows,
            "columns": None if columns is None else tuple(dict.fromkeys((*columns, config.column))),
        }
        return {"data": Prediction(Kind.DATASET, expected(source).model_copy(update=update))}

    def check(self, config: MatchPromptsConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a column that is there already."""
        data = inputs["data"][0]
        if config.column in (data.facts.columns or ()):
            message = f"{data.origin} has a column `{config.column}` already"
            fix = "choose another `column`"
            yield Finding("data", Level.ERROR, certainty(data), message, port="data", fix=fix)
