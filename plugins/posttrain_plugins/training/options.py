"""The options every trainer shares, named as in `transformers.TrainingArguments` where both have them.

Each option changes something or is refused: a combination in which one would be ignored does not validate.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.contracts.component import Config
from posttrain.contracts.stage import StageConfig, VolatileMark

LOGITS = 1 << 28
"""Logits of one forward pass: 1 GiB in float32, and their gradient as much again. One example may exceed it."""

ADAM_ONLY = ("adam_beta1", "adam_beta2", "adam_epsilon")


class Lora(Config):
    """Low-rank adapters: the base stays frozen and the output is an adapter (https://arxiv.org/abs/2106.09685)."""

    r: int = Field(default=8, ge=1, description="rank of each adapter")
    alpha: int = Field(default=16, ge=1, description="scale: updates are multiplied by alpha / r")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout on the adapters' input while training"
    )
    target_modules: str | list[str] = Field(
        default="all-linear",
        min_length=1,
        description="suffixes of the modules that get an adapter, or `all-linear`: all but the head",
    )
    rslora: bool = Field(
        default=False, description="scale by alpha / sqrt(r) (https://arxiv.org/abs/2312.03732)"
    )
    dora: bool = Field(
        default=False, description="learn magnitudes apart from directions (https://arxiv.org/abs/2402.09353)"
    )

    @field_validator("target_modules")
    @classmethod
    def _one_name_is_a_list(cls, value: str | list[str]) -> str | list[str]:
        # peft would take a lone string for a regular expression over whole module paths.
        return [value] if isinstance(value, str) and value != "all-linear" else value


class TrainingOptions(StageConfig):
    """Options of every trainer; each trainer adds its loss."""

    learning_rate: float = Field(default=5e-5, gt=0, description="peak learning rate")
    batch_size: int = Field(default=8, ge=1, description="dataset examples of one optimizer step, all told")
    num_train_epochs: float = Field(default=3.0, gt=0, description="passes over the data; not with max_steps")
    max_steps: int = Field(
        default=-1, ge=-1, description="optimizer steps to take instead of num_train_epochs; -1: unset"
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        default="linear", description="shape of the learning rate after the warm-up"
    )
    warmup_steps: float = Field(
        default=0,
        ge=0,
        description="steps of linear warm-up; below 1: as a share of all steps; not with `constant`",
    )
    optim: Literal["adamw_torch_fused", "adamw_torch", "sgd"] = Field(
        default="adamw_torch_fused", description="the optimizer; fused AdamW computes the same in one kernel"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled weight decay; biases and norms are spared"
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW's decay of the second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's term against division by zero")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="clip the gradient to this norm; 0: do not clip"
    )
    max_length: int | None = Field(
        default=None, ge=2, description="longest sequence in tokens; unset: what the model can take"
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
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
    lora: Lora | None = Field(default=None, description="train low-rank adapters instead of all weights")

    micro_batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=8192,
        ge=1,
        description="tokens, padding included, of one forward and backward pass; fewer where a large vocabulary "
        "would make more than 2^28 logits; memory only, except that dropout, where the model has any, draws its "
        "masks by micro-batch",
    )
    gradient_checkpointing: Annotated[bool, VolatileMark()] = Field(
        default=False, description="recompute activations in the backward pass; less memory, more time"
    )
    logging_steps: Annotated[int, VolatileMark()] = Field(
        default=10, ge=1, description="steps between two reports of metrics"
    )
    save_steps: Annotated[int, VolatileMark()] = Field(
        default=100, ge=0, description="steps between two checkpoints; 0: only when asked to stop"
    )
    save_total_limit: Annotated[int, VolatileMark()] = Field(
        default=2, ge=1, description="checkpoints to keep"
    )

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        defaults = type(self).model_fields
        if self.max_steps == 0:
            raise ValueError(
                "max_steps: 0 trains nothing; give a positive number, or -1 for num_train_epochs"
            )
        if self.max_steps > 0 and self.num_train_epochs != defaults["num_train_epochs"].default:
            raise ValueError("num_train_epochs would be ignored beside max_steps; give one of them")
        if self.lr_scheduler_type == "constant" and self.warmup_steps > 0:
            raise ValueError("warmup_steps would be ignored by `constant`; use constant_with_warmup")
        if self.lr_scheduler_type == "constant_with_warmup" and self.warmup_steps == 0:
            raise ValueError("constant_with_warmup needs warmup_steps")
        ignored = [name for name in ADAM_ONLY if getattr(self, name) != defaults[name].default]
        if self.optim == "sgd" and ignored:
            raise ValueError(f"{', '.join(ignored)} would be ignored by sgd")
        return self
