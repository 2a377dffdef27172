"""The stage `data.pack`: short documents share rows, over the whole dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import Finding, Input, Inputs, Level, Port, Prediction, Stage, StageConfig
from posttrain_plugins.data.tokens.token_rows import FORMATS
from posttrain_plugins.handoffs.lineage import certainty

Strategy = Literal["best_fit", "split", "wrap"]
PAIRS = "token_pairs"


class PackConfig(StageConfig):
    """Which documents share a row, and whether they may be cut."""

    strategy: Strategy = Field(
        default="best_fit",
        description="`best_fit` cuts nothing; `split` cuts what is longer than a row and packs the pieces; `wrap` puts"
        " documents one after the other and cuts wherever a row is full",
    )
    length: int | None = Field(
        default=None, ge=2, description="tokens of a row; unset: what one document may have, `max_length`"
    )
    orphans: bool = Field(
        default=False,
        description="whether a piece of an answer may stand without its prompt; else `split` drops such pieces and"
        " `wrap` takes documents without prompts alone",
    )

    @model_validator(mode="after")
    def _used(self) -> Self:
        if self.orphans and self.strategy == "best_fit":
            raise ValueError("orphans would be ignored: best_fit cuts nothing")
        return self


class Pack(Stage):
    """Put tokenized documents into rows of one length, with little room left.

    What shares a row stays apart: each document is a sequence of its own, which sees nothing of the others. A step
    of packed rows has the gradient of a step of what they hold.
    """

    config = PackConfig
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)
    target = "posttrain_plugins.data.tokens.packed:run"

    def outputs(self, config: PackConfig) -> tuple[Port, ...]:
        """Put out the rows, in the format that came in."""
        formats = frozenset(FORMATS) if config.strategy == "best_fit" else frozenset(FORMATS) - {PAIRS}
        return (Port("data", frozenset({Kind.DATASET}), formats=formats),)

    def predict(self, config: PackConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict all but how many rows there will be."""
        return {"data": Prediction(Kind.DATASET, packed_facts(config, inputs["data"][0].facts))}

    def check(self, config: PackConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report what cannot be packed this way."""
        data = inputs["data"][0]
        facts: DatasetFacts = data.facts
        if facts.format == PAIRS and config.strategy != "best_fit":
            message = f"`{config.strategy}` cuts documents, and both sides of a pair have to stay whole"
            yield _error(data, message, "use `strategy: best_fit`")
        if facts.tokens is None:
            return
        if facts.tokens.packed:
            yield _error(
                data, f"the rows of {data.origin} are packed already", "connect those of `data.tokenize`"
            )
        longest = row_length(PackConfig(), facts)
        if config.length is None and longest is None:
            message = f"nothing says how long a row is to be: {data.origin} was tokenized without max_length"
            yield _error(data, message, "set `length`")
        if config.strategy == "best_fit" and config.length and longest and config.length < longest:
            message = f"rows have {config.length} tokens, and {data.origin} may have documents of {longest}"
            fix = "raise `length`, lower max_length of `data.tokenize`, or use `strategy: split`"
            yield _error(data, message, fix, Level.WARNING)


def row_length(config: PackConfig, facts: DatasetFacts) -> int | None:
    """Return how many tokens a row has: as many as the longest document may have, unless told."""
    longest = None if facts.tokens is None else facts.tokens.max_length
    if config.length is not None or longest is None or facts.format is None:
        return config.length
    return longest * len(FORMATS[facts.format])


def packed_facts(config: PackConfig, facts: DatasetFacts, rows: int | None = None) -> DatasetFacts:
    """Return the facts of packed rows, given those of what they hold."""
    tokens = facts.tokens
    if tokens is not None:
        longest = tokens.max_length
        if config.strategy != "best_fit" and config.length is not None:
            longest = config.length if longest is None else min(longest, config.length)
        tokens = tokens.model_copy(update={"packed": True, "max_length": longest})
    return facts.model_copy(update={"rows": rows, "tokens": tokens})


def _error(data: Input, message: str, fix: str, level: Level = Level.ERROR) -> Finding:
    return Finding("data", level, certainty(data), message, port="data", fix=fix)
