"""What every trainer on a fixed dataset has in common: ports, predictions, checks and estimates. Light."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from posttrain.artifacts.kinds import POLICY, Kind, PolicyFacts
from posttrain.contracts.stage import Certainty, Estimate, Finding, Input, Inputs, Level, Port, Prediction
from posttrain.contracts.trainer import Supervise, Trainer
from posttrain.registry.fields import BoundChoice
from posttrain.wording import did_you_mean
from posttrain_plugins.data.tokens.token_rows import FORMATS as TOKENIZED
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.models.quantized import recorded
from posttrain_plugins.preparation.weights import column_problem
from posttrain_plugins.training.footprint import Footprint
from posttrain_plugins.training.objective import known_metrics, repeated
from posttrain_plugins.training.optimizers import OPTIMIZERS
from posttrain_plugins.training.options import EVALUATION, LOG_PROBS, TrainingOptions
from posttrain_plugins.training.schedules import FITTED

_TINY_BATCH = 8
"""Rows of a step of a smoke run, whose datasets are small too."""


class OfflineTrainer(Trainer):
    """Base of trainers whose steps come from a dataset: model and data in, model or adapter out."""

    target = "posttrain_plugins.training.ranks:run"
    shared = {"training loop": 5}
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

    def shrink(self, config: Any) -> Mapping[str, Any]:
        """Train for two small steps, evaluate after each, and leave out a schedule that does not fit into them."""
        shrunk: dict[str, Any] = dict(self.tiny)
        if config.batch_size > _TINY_BATCH:
            shrunk |= {"batch_size": _TINY_BATCH}
        if config.eval_steps:
            shrunk |= {"eval_steps": 1}
        if config.lr_scheduler_type in FITTED:
            shrunk |= {"lr_scheduler_type": None, "lr_scheduler_kwargs": None, "warmup_steps": None}
        return shrunk

    def outputs(self, config: Any) -> tuple[Port, ...]:
        """Put out a policy: an adapter with `lora` or `peft`, else what came in; callbacks may add others."""
        kinds = frozenset({Kind.ADAPTER}) if config.adapter else POLICY
        return tuple(Port(name, kinds) for name in ("model", *_added(config)))

    def predict(self, config: Any, inputs: Inputs) -> Mapping[str, Prediction]:
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

    def check(self, config: Any, inputs: Inputs) -> Iterable[Finding]:
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
        yield from _check_losses(config)
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

    def estimate(self, config: Any, inputs: Inputs, gpus: int = 0) -> Estimate | None:
        """Estimate the memory of a rank from above."""
        found = Footprint.of(self, config, inputs["model"][0], "cuda" if gpus else "cpu")
        return None if found is None else found.estimate()

    def trained(self, config: Any, parameters: int, width: int) -> int:
        """Return how many weights are trained without an adapter, of a model of so many and this hidden size."""
        return parameters


def _added(config: TrainingOptions) -> tuple[str, ...]:
    """Return the output ports that callbacks add."""
    bound = (choice for choice in config.callbacks if isinstance(choice, BoundChoice))
    return tuple(dict.fromkeys(port for each in bound for port in each.plugin().ports(each.config)))


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
            problem = column_problem(data, config.weight_column)
            if problem is not None and data.facts.format not in TOKENIZED:
                yield _error(port, data, *problem)


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


def _check_losses(config: TrainingOptions) -> Iterable[Finding]:
    """Report a loss that stands twice in a list, and a metric to judge by that none of the losses tells."""
    if not hasattr(config, "loss"):
        return
    twice = repeated(config)
    if twice is not None:
        message = f"the loss `{twice}` stands twice in `loss`, with the same options"
        fix = "leave one out; how much it counts is said by `loss_weights`"
        yield Finding("trainer", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
    told = known_metrics(config) if config.selects else None
    if told is not None and config.metric_for_best_model.removeprefix(f"{EVALUATION}/") not in told:
        known = [f"{EVALUATION}/{name}" for name in sorted(told)]
        message = f"metric_for_best_model is `{config.metric_for_best_model}`, which no evaluation has"
        hint = did_you_mean(config.metric_for_best_model, known)
        fix = f"{f'{hint} ' if hint else ''}There are {', '.join(known)}"
        yield Finding("trainer", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
    elif config.undirected:
        message = f"whether more of {config.metric_for_best_model} is better is not said"
        fix = "`greater_is_better: true` where more is better, `greater_is_better: false` where less is"
        yield Finding("trainer", Level.ERROR, Certainty.VERIFIED, message, fix=fix)


def _error(port: str, found: Input, message: str, fix: str) -> Finding:
    return Finding("trainer", Level.ERROR, certainty(found), message, port=port, fix=fix)
