"""What every trainer on a fixed dataset has in common: ports, predictions, checks and estimates. Light."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from posttrain.artifacts.kinds import POLICY, Kind, PolicyFacts
from posttrain.contracts.stage import Certainty, Estimate, Finding, Input, Inputs, Level, Port, Prediction
from posttrain.contracts.trainer import Supervise, Trainer
from posttrain.registry.fields import BoundChoice
from posttrain_plugins.data.tokens.token_rows import FORMATS as TOKENIZED
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.models.quantized import recorded
from posttrain_plugins.training.optimizers import OPTIMIZERS
from posttrain_plugins.training.options import EVALUATION, HELD, LOG_PROBS, TOKENS, TrainingOptions
from posttrain_plugins.training.peft_options import adapter_size
from posttrain_plugins.training.schedules import FITTED

FLOAT = 4
"""Bytes of a float32: weights, gradients and each of Adam's two moments."""
ACTIVATIONS = 17
"""Floats a layer keeps for its backward pass, by token and unit of width (Korthikanti et al. 2022, eq. 2)."""

TYPICAL = 1024
"""Tokens of a long sequence, where neither the options nor the model bound it."""

_TINY_BATCH = 8
"""Rows of a step of a smoke run, whose datasets are small too."""


class OfflineTrainer(Trainer):
    """Base of trainers whose steps come from a dataset: model and data in, model or adapter out."""

    target = "posttrain_plugins.training.ranks:run"
    shared = {"training loop": 4}
    """Rises when a change of the loop changes results: trainers of other plugins are driven by it too."""
    preload = ("torch", "transformers.trainer")
    tiny = {"max_steps": 2, "num_train_epochs": None, "logging_steps": 1}
    sequences: ClassVar[int] = 1
    """Sequences of an example, for the estimate of memory."""
    referenced: ClassVar[bool] = False
    """Whether it takes what `data.log_probs` says of a reference."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if hasattr(cls, "formats"):
            data = Port("data", frozenset({Kind.DATASET}), formats=cls.formats, training=True)
            held_out = Port(EVALUATION, data.kinds, formats=cls.formats, optional=True)
            cls.inputs = (Port("model", POLICY), data, held_out)
            if cls.referenced:
                cls.inputs += (Port(LOG_PROBS, frozenset({Kind.LOG_PROBS}), optional=True),)

    def shrink(self, config: TrainingOptions) -> Mapping[str, Any]:
        """Train for two small steps, evaluate after each, and leave out a schedule that does not fit into them."""
        shrunk: dict[str, Any] = dict(self.tiny)
        if config.batch_size > _TINY_BATCH:
            shrunk |= {"batch_size": _TINY_BATCH}
        if config.eval_steps:
            shrunk |= {"eval_steps": 1}
        if config.lr_scheduler_type in FITTED:
            shrunk |= {"lr_scheduler_type": None, "lr_scheduler_kwargs": None, "warmup_steps": None}
        return shrunk

    def outputs(self, config: TrainingOptions) -> tuple[Port, ...]:
        """Put out a policy: an adapter with `lora` or `peft`, else what came in; callbacks may add others."""
        kinds = frozenset({Kind.ADAPTER}) if config.adapter else POLICY
        return tuple(Port(name, kinds) for name in ("model", *_added(config)))

    def predict(self, config: TrainingOptions, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the input's facts with trained weights."""
        source, ports = inputs["model"][0], ("model", *_added(config))
        rounded = config.quantization and recorded(config.quantization)
        update = {"dtype": "float32", "merge": None, "quantization": rounded}
        facts: PolicyFacts = source.facts.model_copy(update=update)
        if config.adapter is None:
            return dict.fromkeys(ports, Prediction(source.kind, facts))
        base = source.artifact.digest if source.artifact and source.kind is Kind.MODEL else facts.base
        changes = {"base": base, "parameters": None, "adapter": None}
        return dict.fromkeys(ports, Prediction(Kind.ADAPTER, facts.model_copy(update=changes)))

    def check(self, config: TrainingOptions, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit the model or the data."""
        model, context = inputs["model"][0], inputs["model"][0].facts.context
        if config.max_length is not None and context is not None and config.max_length > context:
            yield _error(
                "model",
                model,
                f"max_length is {config.max_length}, but the model takes {context} tokens",
                f"set max_length to {context} or less, or leave it out",
            )
        if config.adapter is not None and model.kind is Kind.ADAPTER:
            option = "lora" if config.lora else "peft"
            yield _error(
                "model",
                model,
                f"`{option}` would put a new adapter on a model that already is one",
                f"leave `{option}` out to go on training the adapter, or start from its base",
            )
        yield from _check_quantization(config, model)
        yield from _check_vision(config, model)
        yield from _check_columns(config, inputs)
        yield from self._check_tokenized(config, inputs)
        yield from _check_evaluation(config, inputs)
        package = OPTIMIZERS[config.optim].package
        if package is not None and importlib.util.find_spec(package) is None:
            message = f"optim `{config.optim}` needs {package}, which is not installed"
            yield _error("model", model, message, "install `posttrain[quant]`, or use adamw_torch_fused")

    def _check_tokenized(self, config: TrainingOptions, inputs: Inputs) -> Iterable[Finding]:
        ignored = ["weight_column"] if config.weight_column is not None else []
        ignored += ["supervise"] if self.supervise(config) is not Supervise.ANSWERS else []
        for port in ("data", EVALUATION):
            for data in inputs.get(port, ()):
                if ignored and data.facts.format in TOKENIZED:
                    message = f"{', '.join(ignored)} would be ignored: {data.origin} is tokenized already"
                    yield _error(port, data, message, "give it to `data.tokenize` instead")

    def estimate(self, config: TrainingOptions, inputs: Inputs) -> Estimate | None:
        """Estimate the memory from above: as if every token of a full micro-batch were supervised."""
        facts: PolicyFacts = inputs["model"][0].facts
        shape = (facts.layers, facts.width, facts.embeddings)
        if inputs["model"][0].kind is not Kind.MODEL or facts.parameters is None or None in shape:
            return None
        layers, width, embeddings = (int(size or 0) for size in shape)
        trainable = facts.parameters
        if config.adapter is not None:
            trainable = adapter_size(config.adapter, layers, width, embeddings)
        inside = min(trainable, embeddings * width) if config.adapter is None else 0
        state = OPTIMIZERS[config.optim].floats(trainable, inside)
        state += trainable if config.optim_args.get("momentum") else 0
        tokens, longest, bound = self._micro_batch(config, facts.context)
        kept = 1 if config.gradient_checkpointing else ACTIVATIONS
        activations = tokens * width * (layers * kept + ACTIVATIONS)
        # An example stays whole, however many logits it has.
        scored = min(tokens, max(max(HELD.values()) // (FLOAT * embeddings), self.sequences * longest))
        floats = (1 + config.copies) * trainable + state + activations + 2 * scored * embeddings
        weights = facts.parameters * FLOAT
        if config.quantization is not None:
            weights = _quantized(facts.parameters, 2 * embeddings * width, config.quantization.bits)
        return Estimate(
            parameters=facts.parameters,
            trainable=trainable,
            memory_bytes=weights + floats * FLOAT,
            note=f"{bound}, with micro-batches of {tokens} tokens",
        )

    def _micro_batch(self, config: TrainingOptions, context: int | None) -> tuple[int, int, str]:
        """Return tokens of a micro-batch and of its longest sequence, and whether these are bounds.

        What `auto` will measure is not known: at least one example has to fit.
        """
        if config.micro_batch_tokens == "auto":
            longest = config.max_length or context or TYPICAL
            return self.sequences * longest, longest, "at least"
        tokens = config.micro_batch_tokens or max(TOKENS.values())
        longest = config.max_length or context or tokens
        return (
            min(tokens, config.batch_size * self.sequences * longest),
            longest,
            "at most",
        )


def _added(config: TrainingOptions) -> tuple[str, ...]:
    """Return the output ports that callbacks add."""
    bound = (choice for choice in config.callbacks if isinstance(choice, BoundChoice))
    return tuple(dict.fromkeys(port for each in bound for port in each.plugin().ports(each.config)))


def _quantized(parameters: int, kept: int, bits: int) -> int:
    """Bytes of weights in few bits with a scale for each 64 or more; embeddings and head, `kept`, stay as they are."""
    kept = min(parameters, kept)
    return (parameters - kept) * (2 * bits + 1) // 16 + kept * FLOAT


def _check_quantization(config: TrainingOptions, model: Input) -> Iterable[Finding]:
    if config.quantization is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        message = "quantization needs bitsandbytes, which is not installed"
        yield _error("model", model, message, "install `posttrain[quant]`, or leave `quantization` out")
    if config.adapter is None and model.kind is Kind.MODEL:
        yield _error(
            "model",
            model,
            "weights in 4 or 8 bits cannot be trained, only an adapter on them",
            "add `lora` or `peft`, start from an adapter, or leave `quantization` out",
        )


def _check_vision(config: TrainingOptions, model: Input) -> Iterable[Finding]:
    """Say that what sees is not trained; it has to be asked for."""
    if config.unfreeze and model.kind is Kind.ADAPTER:
        message = "`unfreeze` would be ignored: an adapter is trained where it already is"
        yield _error("model", model, message, "leave `unfreeze` out, or start from the adapter's base")
    elif config.unfreeze and model.facts.sees is False:
        message = f"`unfreeze` would be ignored: {model.origin} takes no images"
        yield _error("model", model, message, "leave `unfreeze` out")
    elif model.facts.sees and not config.unfreeze:
        message = f"what sees in {model.origin} (vision tower, projector) stays frozen; the language part is trained"
        fix = "name the modules to train too in `unfreeze`"
        yield Finding("trainer", Level.NOTE, certainty(model), message, port="model", fix=fix)


def _check_columns(config: TrainingOptions, inputs: Inputs) -> Iterable[Finding]:
    for port in ("data", EVALUATION):
        for data in inputs.get(port, ()):
            columns = data.facts.columns
            if config.weight_column is None or columns is None or config.weight_column in columns:
                continue
            if data.facts.format in TOKENIZED:
                continue
            yield _error(
                port,
                data,
                f"not every row has the weight column `{config.weight_column}`",
                f"name one of {', '.join(columns)}, or leave weight_column out",
            )


def _check_evaluation(config: TrainingOptions, inputs: Inputs) -> Iterable[Finding]:
    if config.evaluates and not inputs.get(EVALUATION):
        yield Finding(
            "trainer",
            Level.ERROR,
            Certainty.VERIFIED,
            f"{', '.join(config.evaluates)} would be ignored: nothing is connected to the port `{EVALUATION}`",
            port=EVALUATION,
            fix=f"connect a dataset that is not trained on to `{EVALUATION}`, or leave these options out",
        )


def _error(port: str, found: Input, message: str, fix: str) -> Finding:
    return Finding("trainer", Level.ERROR, certainty(found), message, port=port, fix=fix)
