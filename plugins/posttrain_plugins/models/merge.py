"""The stage `model.merge`: the model that an adapter makes of its base, as an ordinary one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.stage import (
    Finding,
    Inputs,
    Level,
    Port,
    Prediction,
    Stage,
    StageConfig,
)
from posttrain_plugins.handoffs.lineage import certainty

ADAPTER = "adapter"
MODEL = "model"
Dtype = Literal["float32", "bfloat16", "float16"]
Into = Literal["base", "dequantized"]


class MergeConfig(StageConfig):
    """Options of `model.merge`."""

    dtype: Dtype = Field(
        default="float32",
        description="precision of the merged weights; they are merged in float32 whatever it is, and 16 bits round "
        "away the smallest of what was learned",
    )
    into: Into = Field(
        default="base",
        description="what the adapter is merged into: its `base` as it is in the store; or, of an adapter that was "
        "trained on a base in few bits, the `dequantized` base, whose rounded weights are what it was trained on",
    )


class Merge(Stage):
    """Merge an adapter into its base, and verify that the result computes what the adapter on its base does.

    Deltas are computed and added in float32, whatever the precision of the base. What was saved is opened again and
    compared with the adapter on its base, logit by logit, on conversations and on random tokens.
    """

    config = MergeConfig
    inputs = (Port(ADAPTER, frozenset({Kind.ADAPTER})),)
    target = "posttrain_plugins.models.merging:run"
    preload = ("torch", "transformers")

    def outputs(self, config: MergeConfig) -> tuple[Port, ...]:
        """Return the model."""
        return (Port(MODEL, frozenset({Kind.MODEL})),)

    def predict(self, config: MergeConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the adapter's facts without what makes it an adapter."""
        facts: PolicyFacts = inputs[ADAPTER][0].facts
        changes = {
            "dtype": config.dtype,
            "parameters": None,
            "base": None,
            "adapter": None,
            "quantization": None,
            # Layers that share weights no longer do once one of them alone was trained.
            "shape": None,
        }
        return {MODEL: Prediction(Kind.MODEL, facts.model_copy(update=changes))}

    def check(self, config: MergeConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit how the adapter was trained."""
        adapter = inputs[ADAPTER][0]
        quantized = adapter.facts.quantization is not None
        if config.into == "dequantized" and adapter.verified and not quantized:
            yield Finding(
                "merge",
                Level.ERROR,
                certainty(adapter),
                f"{adapter.origin} was trained on its base as it is, so there is nothing to dequantize",
                port=ADAPTER,
                fix="leave `into` out",
            )
        if config.into == "base" and quantized:
            yield Finding(
                "merge",
                Level.NOTE,
                certainty(adapter),
                f"{adapter.origin} was trained on its base in {adapter.facts.quantization['bits']} bits and is "
                "merged into the whole base, which computes something else; the stage tells how much else",
                port=ADAPTER,
                fix="`into: dequantized` gives what was trained",
            )
