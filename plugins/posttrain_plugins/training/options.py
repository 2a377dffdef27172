"""The options every trainer shares, named as in `transformers.TrainingArguments` where both have them.

Each option changes something or is refused: a combination in which one would be ignored does not validate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import StageConfig, VolatileMark
from posttrain_plugins.training.elsewhere import ELSEWHERE
from posttrain_plugins.training.optimizers import ADAM_OPTIONS, OPTIMIZERS, OptimizerName
from posttrain_plugins.training.peft_options import REWRITING, Adapter, Lora, Peft, Quantization
from posttrain_plugins.training.schedules import SCHEDULES, ScheduleName

HELD = {"cpu": 192 << 20, "cuda": 1 << 30}
"""Bytes of the float32 logits of one micro-batch, by device; one example may exceed it. A CPU's matrix products are
no faster with more, and a GPU's hardly."""

TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a micro-batch unless told otherwise, by device: what keeps either busy without asking for much memory."""
EVALUATION = "eval"
"""The input port, and what the names of an evaluation's metrics start with."""
LOG_PROBS = "log_probs"
"""The input port for what a reference says, scored before."""
Precision = Literal["float32", "bfloat16", "float16"]
Truncation = Literal["keep_start", "keep_end", "drop", "error"]


class TrainingOptions(StageConfig):
    """Options of every trainer; each trainer adds its loss."""

    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE

    learning_rate: float = Field(default=5e-5, gt=0, description="peak learning rate")
    learning_rate_groups: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="other peak learning rates for some parameters: a regular expression that is searched for in "
        "their names, such as `embed_tokens` or `layers\\.[0-3]\\.`, and the rate; no parameter may have two",
    )
    batch_size: int = Field(default=8, ge=1, description="dataset rows of one optimizer step, all told")
    num_train_epochs: float = Field(default=3.0, gt=0, description="passes over the data; not with max_steps")
    max_steps: int = Field(
        default=-1, ge=-1, description="optimizer steps to take instead of num_train_epochs; -1: unset"
    )
    lr_scheduler_type: ScheduleName = Field(
        default="linear", description="shape of the learning rate after the warm-up"
    )
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(
        default={}, description="what the schedule takes beside: `min_lr`, `num_decay_steps`, …"
    )
    warmup_steps: float = Field(
        default=0,
        ge=0,
        description="steps of linear warm-up; below 1: as a share of all steps; not with `constant`",
    )
    optim: OptimizerName = Field(
        default="adamw_torch_fused", description="the optimizer; fused AdamW computes the same in one kernel"
    )
    optim_args: dict[str, bool | int | float] = Field(
        default={}, description="what the optimizer takes beside: `momentum` of sgd, `alpha` of ademamix, …"
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="weight decay, of which biases and norms are spared; decoupled, but added to the gradient by "
        "sgd, adagrad and rmsprop",
    )
    adam_beta1: float = Field(
        default=0.9, ge=0, lt=1, description="decay of the first moment of AdamW, AdEMAMix and Lion"
    )
    adam_beta2: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="decay of the second moment of the same; Lion's authors use 0.99",
    )
    adam_epsilon: float = Field(
        default=1e-8, gt=0, description="term against division by zero of AdamW and AdEMAMix"
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="clip the gradient to this norm; 0: do not clip"
    )
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
    shuffle: bool = Field(
        default=True, description="visit the rows in another order in each epoch, drawn from the seed"
    )
    seed: int = Field(default=42, ge=0, lt=2**32, description="seed of data order, dropout and new adapters")
    bf16: bool = Field(default=False, description="compute in bfloat16 with float32 weights (autocast)")
    fp16: bool = Field(
        default=False,
        description="compute in float16 with float32 weights (autocast) and a scaled loss; steps whose gradient "
        "overflows are skipped and counted, and 20 in a row stop the training",
    )
    lora: Lora | None = Field(default=None, description="train low-rank adapters instead of all weights")
    peft: Peft | None = Field(
        default=None, description="train adapters of another `method`, such as `loha` or `ia3`; not with lora"
    )
    quantization: Quantization | None = Field(
        default=None, description="hold the frozen base under an adapter in 4 or 8 bits; needs bitsandbytes"
    )
    unfreeze: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="modules of a vision-language model that see and are to be trained too, by the end of their path, "
        "such as `multi_modal_projector` or `vision_tower`; with an adapter, they get it as well; all others that "
        "see stay frozen",
    )

    eval_steps: int = Field(
        default=0,
        ge=0,
        description="steps between two evaluations on the dataset of port `eval`, the last step beside; 0: only "
        "after the last one",
    )
    eval_on_start: bool = Field(default=False, description="evaluate before the first step too")
    metric_for_best_model: str = Field(
        default="eval/loss",
        description="the metric of an evaluation that says which one was the best",
    )
    greater_is_better: bool | None = Field(
        default=None, description="whether more of it is better; unset: less, where its name ends in `loss`"
    )
    load_best_model_at_end: bool = Field(
        default=False, description="put out the weights of the best evaluation instead of the last ones"
    )
    early_stopping_patience: int | None = Field(
        default=None, ge=1, description="stop after this many evaluations in a row without a better one"
    )
    early_stopping_threshold: float = Field(
        default=0.0, ge=0, description="how much better it must be to count for that"
    )

    callbacks: list[Annotated[Choice, Uses(Group.CALLBACK)]] = Field(
        default=[],
        description="what joins the training, in this order: `[bema, {name: completions, prompts: [Hello]}]`",
    )
    backend: Annotated[Choice, Uses(Group.BACKEND), VolatileMark()] = Field(
        default=Choice(name="single"),
        description="how many processes share each step, and how: `single`, or `{name: ddp, ranks: 2}`, fsdp2 or "
        "deepspeed; it changes results by rounding only, and dropout masks where the model has any",
    )
    micro_batch_tokens: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"] | None, VolatileMark()] = (
        Field(
            default=None,
            description="tokens, padding included, of one forward and backward pass of one rank; `auto` measures "
            f"what fits into the free memory; unset: {TOKENS['cpu']} on a CPU, {TOKENS['cuda']} on a GPU; memory "
            "only, except that dropout, where the model has any, draws its masks by micro-batch",
        )
    )
    layout: Annotated[Literal["auto", "padded", "packed", "shared_prefix"], VolatileMark()] = Field(
        default="auto",
        description="how sequences lie in rows: one a row with padding, all in one row without, or one row in which "
        "the sequences of an example compute their common prefix once; `auto` takes the cheapest that is exact",
    )
    gradient_checkpointing: Annotated[bool, VolatileMark()] = Field(
        default=False, description="recompute activations in the backward pass; less memory, more time"
    )
    logging_steps: Annotated[int, VolatileMark()] = Field(
        default=10, ge=1, description="steps between two reports of metrics"
    )
    save_steps: Annotated[int, VolatileMark()] = Field(
        default=100,
        ge=0,
        description="steps between two checkpoints; 0: only at the end, when asked to stop, and of the best weights",
    )
    save_total_limit: Annotated[int, VolatileMark()] = Field(
        default=2, ge=1, description="newest checkpoints to keep; the best one stays beside them"
    )

    @field_validator("learning_rate_groups")
    @classmethod
    def _patterns(cls, value: dict[str, float]) -> dict[str, float]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return value

    @field_validator("metric_for_best_model")
    @classmethod
    def _of_an_evaluation(cls, value: str) -> str:
        prefix = f"{EVALUATION}/"
        if not value.startswith(prefix) or value == prefix:
            name = value.removeprefix("eval_").removeprefix(prefix) or "loss"
            raise ValueError(f"metrics of an evaluation are named {prefix}…; did you mean {prefix}{name}?")
        return value

    @model_validator(mode="after")
    def _length(self) -> Self:
        if self.max_steps == 0:
            raise ValueError(
                "max_steps: 0 trains nothing; give a positive number, or -1 for num_train_epochs"
            )
        if self.max_steps > 0 and self._given("num_train_epochs"):
            raise ValueError("num_train_epochs would be ignored beside max_steps; give one of them")
        return self

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        kind = self.lr_scheduler_type
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError("warmup_steps from 1 on is a number of whole steps; below 1, a share of all")
        if kind == "constant" and self.warmup_steps > 0:
            raise ValueError("warmup_steps would be ignored by `constant`; use constant_with_warmup")
        if kind == "constant_with_warmup" and self.warmup_steps == 0:
            raise ValueError("constant_with_warmup needs warmup_steps")
        chosen = _details("lr_scheduler_kwargs", kind, SCHEDULES[kind], self.lr_scheduler_kwargs)
        lowest = getattr(chosen, "lr_end", None) or getattr(chosen, "min_lr", None) or 0.0
        if lowest >= self.learning_rate:
            raise ValueError(
                f"the schedule would end at {lowest:g}, which is not below learning_rate ({self.learning_rate:g})"
            )
        if self.warmup_steps == 0 and "warmup_type" in self.lr_scheduler_kwargs:
            raise ValueError("warmup_type would be ignored without warmup_steps")
        return self

    @model_validator(mode="after")
    def _optimizer(self) -> Self:
        about = OPTIMIZERS[self.optim]
        ignored = [name for name in ADAM_OPTIONS if name not in about.adam and self._given(name)]
        if ignored:
            raise ValueError(f"{', '.join(ignored)} would be ignored by {self.optim}")
        _details("optim_args", self.optim, about.extra, self.optim_args)
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude each other")
        return self

    @model_validator(mode="after")
    def _adapter(self) -> Self:
        if self.lora is not None and self.peft is not None:
            raise ValueError("lora and peft exclude each other; give one of them")
        if self.quantization is None or self.adapter is None:
            return self
        if not self.adapter.quantizable:
            raise ValueError(
                f"{type(self.adapter).__name__.lower()} adapters need a base without quantization"
            )
        if self.lora is not None and self.lora.init in REWRITING:
            raise ValueError(
                f"lora.init `{self.lora.init}` changes the base, which quantization rounds again"
            )
        return self

    @model_validator(mode="after")
    def _selection(self) -> Self:
        patient = self.early_stopping_patience is not None
        if self._given("early_stopping_threshold") and not patient:
            raise ValueError("early_stopping_threshold would be ignored without early_stopping_patience")
        if not (patient or self.load_best_model_at_end):
            for name in ("metric_for_best_model", "greater_is_better"):
                if self._given(name):
                    raise ValueError(
                        f"{name} would be ignored without load_best_model_at_end or early_stopping_patience"
                    )
            return self
        if self.eval_steps == 0:
            wanted = "early_stopping_patience" if patient else "load_best_model_at_end"
            raise ValueError(f"{wanted} needs eval_steps: there would be one evaluation, after the last step")
        return self

    def _given(self, name: str) -> bool:
        """Whether an option is not what it is when left out."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def adapter(self) -> Adapter | None:
        """The fresh adapter that is asked for, whichever kind it is."""
        return self.lora or self.peft

    @property
    def precision(self) -> Precision:
        """What the forward and backward passes are computed in."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def budget(self, device: str) -> int | None:
        """Return the tokens of a micro-batch on a device, `cpu` or `cuda`; None where that is to be measured."""
        return None if self.micro_batch_tokens == "auto" else self.micro_batch_tokens or TOKENS[device]

    @property
    def copies(self) -> int:
        """How many further copies of the trained weights are kept while training goes on."""
        return 0

    @property
    def selects(self) -> bool:
        """Whether evaluations are compared by a metric."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    @property
    def undirected(self) -> bool:
        """Whether evaluations are compared by a metric of which more may be better, or less."""
        lower = self.metric_for_best_model.endswith("loss")
        return self.selects and self.greater_is_better is None and not lower

    @property
    def evaluates(self) -> list[str]:
        """The options given that mean nothing without an evaluation set."""
        names = ("eval_steps", "eval_on_start", "load_best_model_at_end", "early_stopping_patience")
        return [name for name in names if self._given(name)]


def held_positions(device: str, vocabulary: int) -> int:
    """Return of how many tokens a micro-batch holds the logits at most, on a device, `cpu` or `cuda`."""
    return max(1, HELD[device] // (4 * vocabulary))


def _details(option: str, kind: str, model: type[Config], given: Mapping[str, Any]) -> Config:
    """Validate what a schedule or an optimizer takes beside.

    Raises:
        ValueError: It does not take that, or lacks something; all problems in one message.
    """
    try:
        return model(**given)
    except ValidationError as error:
        takes = ", ".join(f"`{name}`" for name in model.model_fields) or "nothing beside"
        said = [_said(found) for found in error.errors()]
        raise ValueError(f"{option} of {kind}: {'; '.join(said)}; it takes {takes}") from error


def _said(error: Mapping[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return f"`{name}` is missing"
        case "extra_forbidden":
            return f"`{name}` is unknown"
        case _:
            message = str(error["msg"]).removeprefix("Value error, ")
            return f"`{name}`: {message}" if name else message
