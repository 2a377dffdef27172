"""The stage `model.merge`: the model that an adapter makes of its base, as an ordinary one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Input,
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
Made = Literal[Kind.MODEL, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL]
_TAKEN = {Kind.MODEL: Kind.ADAPTER}
"""Kinds that are called otherwise while they are adapters."""


class MergeConfig(StageConfig):
    """Options of `model.merge`."""

    dtype: Dtype = Field(
        default="float32",
        description="precision of the merged weights; they are merged in float32 whatever it is, and 16 bits round "
        "away the smallest of what was learned",
    )
    kind: Made = Field(
        default=Kind.MODEL,
        description="what comes out: the policy `model`, or of the adapter of a model that gives numbers, with its "
        "head, a `reward-model` or `process-reward-model`",
    )
    into: Into = Field(
        default="base",
        description="what the adapter is merged into: its `base` as it is in the store; or, of an adapter that was "
        "trained on a base in few bits, the `dequantized` base, whose rounded weights are what it was trained on",
    )


class Merge(Stage):
    """Merge an adapter into its base, and verify that the result computes what the adapter on its base does.

    Deltas are computed and added in float32, whatever the precision of the base. What was saved is opened again and
    compared with the adapter on its base, logit by logit, on conversations and on random tokens. Of models that give
    numbers these are compared, at every token.
    """

    config = MergeConfig
    inputs = (Port(ADAPTER, frozenset({Kind.ADAPTER, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL})),)
    target = "posttrain_plugins.models.merging:run"
    preload = ("torch", "transformers")

    def outputs(self, config: MergeConfig) -> tuple[Port, ...]:
        """Return the model."""
        return (Port(MODEL, frozenset({config.kind})),)

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
        return {MODEL: Prediction(config.kind, facts.model_copy(update=changes))}

    def check(self, config: MergeConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit how the adapter was trained."""
        adapter = inputs[ADAPTER][0]
        yield from _misfits(adapter, config.kind)
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


def _misfits(adapter: Input, kind: Kind) -> Iterable[Finding]:
    """Report an adapter of another kind than is to come out, and a model that is none."""
    if adapter.kind is not _TAKEN.get(kind, kind):
        wanted = next((made for made, taken in _TAKEN.items() if taken is adapter.kind), adapter.kind)
        message = f"{adapter.origin} is {_KINDS[wanted]}, and `kind: {kind}` is to come out"
        fix = f"set `kind: {wanted}`"
    elif adapter.kind is not Kind.ADAPTER and adapter.verified and adapter.facts.base is None:
        message, fix = f"{adapter.origin} is a whole model, and no adapter", "use it as it is"
    else:
        return
    # Of which kind it is, the pipeline says itself.
    yield Finding("merge", Level.ERROR, Certainty.VERIFIED, message, port=ADAPTER, fix=fix)


_KINDS = {
    Kind.MODEL: "the adapter of a policy",
    Kind.REWARD_MODEL: "a reward model",
    Kind.PROCESS_REWARD_MODEL: "a process reward model",
}
