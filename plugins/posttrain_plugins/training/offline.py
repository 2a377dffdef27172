"""What every trainer on a fixed dataset has in common: ports, predictions, checks and estimates. Light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from posttrain.artifacts.kinds import POLICY, Kind, PolicyFacts
from posttrain.contracts.stage import Estimate, Finding, Input, Inputs, Level, Port, Prediction
from posttrain.contracts.trainer import Trainer
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.training.options import LOGITS, TrainingOptions

FLOAT = 4
"""Bytes of a float32: weights, gradients and each of Adam's two moments."""
ACTIVATIONS = 17
"""Floats a layer keeps for its backward pass, by token and unit of width (Korthikanti et al. 2022, eq. 2)."""


class OfflineTrainer(Trainer):
    """Base of trainers whose steps come from a dataset: model and data in, model or adapter out."""

    target = "posttrain_plugins.training.stage:run"
    shared = {"training loop": 1}
    """Rises when a change of the loop changes results: trainers of other plugins are driven by it too."""
    preload = ("torch", "transformers.trainer")
    tiny = {"max_steps": 2, "num_train_epochs": None, "logging_steps": 1}
    sequences: ClassVar[int] = 1
    """Sequences of an example, for the estimate of memory."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if hasattr(cls, "formats"):
            data = Port("data", frozenset({Kind.DATASET}), formats=cls.formats, training=True)
            cls.inputs = (Port("model", POLICY), data)

    def outputs(self, config: TrainingOptions) -> tuple[Port, ...]:
        """Put out a policy: an adapter with `lora`, else what came in."""
        return (Port("model", frozenset({Kind.ADAPTER}) if config.lora else POLICY),)

    def predict(self, config: TrainingOptions, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the input's facts with trained weights."""
        source = inputs["model"][0]
        facts: PolicyFacts = source.facts.model_copy(update={"dtype": "float32"})
        if config.lora is None:
            return {"model": Prediction(source.kind, facts)}
        base = source.artifact.digest if source.artifact and source.kind is Kind.MODEL else facts.base
        update = {"base": base, "parameters": None, "adapter": None}
        return {"model": Prediction(Kind.ADAPTER, facts.model_copy(update=update))}

    def check(self, config: TrainingOptions, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit the model or the data."""
        model, data = inputs["model"][0], inputs["data"][0]
        context, columns = model.facts.context, data.facts.columns
        if config.max_length is not None and context is not None and config.max_length > context:
            yield _error(
                "model",
                model,
                f"max_length is {config.max_length}, but the model takes {context} tokens",
                f"set max_length to {context} or less, or leave it out",
            )
        if config.lora is not None and model.kind is Kind.ADAPTER:
            yield _error(
                "model",
                model,
                "`lora` would put a new adapter on a model that already is one",
                "leave `lora` out to go on training the adapter, or start from its base",
            )
        if config.weight_column is not None and columns is not None and config.weight_column not in columns:
            yield _error(
                "data",
                data,
                f"not every row has the weight column `{config.weight_column}`",
                f"name one of {', '.join(columns)}, or leave weight_column out",
            )

    def estimate(self, config: TrainingOptions, inputs: Inputs) -> Estimate | None:
        """Estimate the memory from above: as if every token of a full micro-batch were supervised."""
        facts: PolicyFacts = inputs["model"][0].facts
        shape = (facts.layers, facts.width, facts.embeddings)
        if inputs["model"][0].kind is not Kind.MODEL or facts.parameters is None or None in shape:
            return None
        layers, width, embeddings = (int(size or 0) for size in shape)
        trainable = (
            facts.parameters if config.lora is None else _lora_parameters(config.lora.r, layers, width)
        )
        moments = 0 if config.optim == "sgd" else 2
        longest = config.max_length or facts.context or config.micro_batch_tokens
        tokens = min(config.micro_batch_tokens, config.batch_size * self.sequences * longest)
        kept = 1 if config.gradient_checkpointing else ACTIVATIONS
        activations = tokens * width * (layers * kept + ACTIVATIONS)
        # An example stays whole, however many logits it has.
        scored = min(tokens, max(LOGITS // embeddings, self.sequences * longest))
        floats = facts.parameters + trainable * (1 + moments) + activations + 2 * scored * embeddings
        return Estimate(
            parameters=facts.parameters,
            trainable=trainable,
            memory_bytes=floats * FLOAT,
            note=f"at most, with micro-batches of {tokens} tokens",
        )


def _lora_parameters(rank: int, layers: int, width: int) -> int:
    """Adapters on four attention and three feed-forward projections (four times as wide) of every layer."""
    return rank * layers * (4 * 2 * width + 3 * 5 * width)


def _error(port: str, found: Input, message: str, fix: str) -> Finding:
    return Finding("trainer", Level.ERROR, certainty(found), message, port=port, fix=fix)
