"""The stage `data.tokenize`: rows into tokens, once for all trainings with the same tokenizer and template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import Field

from posttrain.artifacts.kinds import POLICY, DatasetFacts, Kind, PolicyFacts, TokenFacts
from posttrain.contracts.stage import (
    Finding,
    Inputs,
    Level,
    Port,
    Prediction,
    Stage,
    StageConfig,
)
from posttrain.contracts.trainer import Supervise
from posttrain_plugins.data.tokens.token_rows import COLUMNS, FORMATS
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.preparation.weights import column_problem
from posttrain_plugins.training.options import Truncation

MADE: Mapping[str, str] = {
    "text": "tokens",
    "messages": "tokens",
    "prompt_completion": "tokens",
    "preference": "token_pairs",
}
"""The formats that can be tokenized, and what they become."""


class TokenizeConfig(StageConfig):
    """How rows become tokens: the options that trainers have for it too."""

    max_length: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens; unset: what the model can take"
    )
    truncation: Truncation = Field(
        default="keep_start",
        description="what becomes of a longer sequence: keep its start; cut the prompt from the left (both sides of"
        " a pair alike; dropped when the prompt is too short for that); drop its row; or stop with an error",
    )
    weight_column: str | None = Field(
        default=None, min_length=1, description="dataset column whose number multiplies the row's loss values"
    )
    supervise: Supervise = Field(
        default=Supervise.ANSWERS,
        description="what is learned: the completion or every assistant turn (`answers`), the last assistant turn"
        " alone, or everything, prompts too",
    )


class Tokenize(Stage):
    """Tokenize a dataset and say which tokens are learned, as a trainer would do it before its first step.

    The result is a file that trainers read in place, so that datasets need not fit into memory. It is of use with
    the same tokenizer and chat template alone; its facts name both.
    """

    config = TokenizeConfig
    inputs = (
        Port("data", frozenset({Kind.DATASET}), formats=frozenset(MADE)),
        Port("model", POLICY),
    )
    target = "posttrain_plugins.data.tokens.tokenizing:run"

    def outputs(self, config: TokenizeConfig) -> tuple[Port, ...]:
        """Put out the tokens."""
        return (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)

    def predict(self, config: TokenizeConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict all but how many rows stay."""
        data, model = inputs["data"][0].facts, inputs["model"][0].facts
        return {"data": Prediction(Kind.DATASET, token_facts(config, data, model))}

    def check(self, config: TokenizeConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a length that the model cannot take, and weights that are missing or none."""
        data, model = inputs["data"][0], inputs["model"][0]
        context = model.facts.context
        if config.max_length is not None and context is not None and config.max_length > context:
            message = f"max_length is {config.max_length}, but the model takes {context} tokens"
            fix = f"set max_length to {context} or less, or leave it out"
            yield Finding("data", Level.ERROR, certainty(model), message, port="model", fix=fix)
        problem = column_problem(data, config.weight_column)
        if problem is not None:
            message, fix = problem
            yield Finding("data", Level.ERROR, certainty(data), message, port="data", fix=fix)


def token_facts(
    config: TokenizeConfig, data: DatasetFacts, model: PolicyFacts, rows: int | None = None
) -> DatasetFacts:
    """Return the facts of the tokens of some data, made for some model."""
    made = TokenFacts(
        tokenizer=model.tokenizer,
        template=None if model.template is None else model.template.tokens,
        max_length=config.max_length or model.context,
        packed=False,
    )
    return DatasetFacts(
        format=None if data.format is None else MADE.get(data.format),
        columns=COLUMNS,
        rows=rows,
        policy=data.policy,
        conversational=False,
        tokens=made,
    )
