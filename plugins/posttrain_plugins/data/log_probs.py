"""The stage `data.log_probs`: what a reference says of a dataset's answers, once for many trainings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import POLICY, DatasetFacts, Kind, LogProbFacts, PolicyFacts
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
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.preparation.mismatched import MISMATCHED
from posttrain_plugins.training.options import LOG_PROBS, TOKENS, Precision, Truncation
from posttrain_plugins.training.peft_options import Quantization

ROLES: Mapping[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "token_pairs": ("chosen", "rejected"),
    "unpaired_preference": ("completion",),
}
"""The answers of a row, by the dataset's format."""


class LogProbsConfig(StageConfig):
    """What is scored, and how: the options that trainers have for it too."""

    weight_column: ClassVar[str | None] = None

    max_length: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens; unset: what the model can take"
    )
    truncation: Truncation = Field(
        default="keep_start", description="what becomes of a longer sequence, as the trainer's option says it"
    )
    mismatched: bool = Field(
        default=False,
        description="score the answers of other rows to each prompt too, as the loss `kto` needs them; of "
        "answers that are good or bad alone",
    )
    seed: int = Field(
        default=42, ge=0, lt=2**32, description="seed by which rows are given the answers of other rows"
    )
    tokens: bool = Field(
        default=False, description="keep the log-prob of each token, for losses that look into answers"
    )
    bf16: bool = Field(default=False, description="compute in bfloat16 (autocast)")
    fp16: bool = Field(default=False, description="compute in float16 (autocast)")
    quantization: Quantization | None = Field(
        default=None, description="hold the model in few bits, as a training with this option does"
    )
    micro_batch_tokens: Annotated[int | None, VolatileMark(), Field(ge=1)] = Field(
        default=None,
        description=f"tokens, padding included, of one forward pass; unset: {TOKENS['cpu']} on a CPU, "
        f"{TOKENS['cuda']} on a GPU",
    )
    layout: Annotated[Literal["auto", "padded", "packed", "shared_prefix"], VolatileMark()] = Field(
        default="auto", description="how sequences lie in rows; `auto` takes the cheapest that is exact"
    )

    @model_validator(mode="after")
    def _used(self) -> LogProbsConfig:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude each other")
        if self.seed != type(self).model_fields["seed"].default and not self.mismatched:
            raise ValueError("seed would be ignored without `mismatched`")
        return self

    @property
    def precision(self) -> Precision:
        """What forward passes are computed in."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"


class LogProbs(Stage):
    """Score the answers of a dataset with a policy: the log-probs of a reference, once for many trainings.

    Trainings from that policy on that dataset take them at their port `log_probs` and skip their own pass over the
    reference: a sweep over `beta` scores it once. Their facts name all that they depend on, and trainings refuse
    those of another policy, dataset or length.
    """

    config = LogProbsConfig
    inputs = (
        Port("model", POLICY),
        Port("data", frozenset({Kind.DATASET}), formats=frozenset(ROLES)),
    )
    target = "posttrain_plugins.training.scoring:run"
    preload = ("torch", "transformers.trainer")

    def outputs(self, config: LogProbsConfig) -> tuple[Port, ...]:
        """Put out the log-probs."""
        return (Port(LOG_PROBS, frozenset({Kind.LOG_PROBS})),)

    def predict(self, config: LogProbsConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict all but how many rows there are."""
        model, data = inputs["model"][0], inputs["data"][0]
        policy, source = (each.artifact.digest if each.artifact else None for each in (model, data))
        facts = log_prob_facts(config, model.facts, data.facts.format, policy, source)
        return {LOG_PROBS: Prediction(Kind.LOG_PROBS, facts)}

    def check(self, config: LogProbsConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit the model or the data."""
        model, data = inputs["model"][0], inputs["data"][0]
        context, format = model.facts.context, data.facts.format
        if config.max_length is not None and context is not None and config.max_length > context:
            message = f"max_length is {config.max_length}, but the model takes {context} tokens"
            fix = f"set max_length to {context} or less, or leave it out"
            yield Finding("data", Level.ERROR, certainty(model), message, port="model", fix=fix)
        if config.mismatched and format in ROLES and format != "unpaired_preference":
            message = f"mismatched would be ignored: rows of {data.origin} are pairs"
            yield Finding("data", Level.ERROR, certainty(data), message, port="data", fix="leave it out")


def log_prob_facts(
    config: LogProbsConfig,
    model: PolicyFacts,
    format: str | None,
    policy: str | None,
    data: str | None,
    rows: int | None = None,
) -> DatasetFacts:
    """Return the facts of the log-probs of some data under some policy."""
    roles = None if format is None else ROLES[format]
    made = LogProbFacts(
        policy=policy,
        data=data,
        roles=(*roles, MISMATCHED) if roles is not None and config.mismatched else roles,
        tokens=config.tokens,
        seed=config.seed if config.mismatched else None,
        options=conditions(config, model.context),
    )
    return DatasetFacts(rows=rows, log_probs=made)


def conditions(config: Any, context: int | None) -> dict[str, Any]:
    """Return what decides log-probs beside policy and data, of this stage's options or a trainer's.

    Args:
        config: The options.
        context: The longest sequence that the model takes.
    """
    quantization = config.quantization
    return {
        "max_length": config.max_length or context,
        "truncation": config.truncation,
        "precision": config.precision,
        "quantization": quantization and quantization.model_dump(mode="json"),
    }
