"""Options of adapters and of the frozen base under them. Light: what they make is in `adapters.py`.

Only what a test trains, saves, opens again and merges is offered. Options keep peft's names, without prefixes.
"""

from __future__ import annotations

from math import isqrt
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.contracts.component import Config

ALL_LINEAR = "all-linear"
REWRITING = frozenset({"pissa", "olora"})
"""Initializations that take the adapter's first product out of the base weights."""


class _Placed(Config):
    """Which modules get an adapter, and which are trained whole beside it."""

    quantizable: ClassVar[bool] = False
    """Whether the adapter can sit on a base in 4 or 8 bits."""

    target_modules: str | list[str] = Field(
        default=ALL_LINEAR,
        min_length=1,
        description="suffixes of the modules that get an adapter, or `all-linear`: all but the head",
    )
    exclude_modules: list[str] = Field(
        default=[], description="suffixes of modules that get none, though `target_modules` names them"
    )
    modules_to_save: list[str] = Field(
        default=[], description="suffixes of modules that are trained whole and saved with the adapter"
    )

    @field_validator("target_modules")
    @classmethod
    def _one_name_is_a_list(cls, value: str | list[str]) -> str | list[str]:
        # peft would take a lone string for a regular expression over whole module paths.
        return [value] if isinstance(value, str) and value != ALL_LINEAR else value

    def size(self, inputs: int, outputs: int) -> int:
        """Return roughly how many parameters the adapter of one linear layer has."""
        return outputs


class _Layered(_Placed):
    layers_to_transform: list[Annotated[int, Field(ge=0)]] = Field(
        default=[],
        description="numbers of the layers that get adapters, from 0; empty: all; needs a list in `target_modules`",
    )

    @model_validator(mode="after")
    def _layers_of_named_modules(self) -> Self:
        if self.layers_to_transform and self.target_modules == ALL_LINEAR:
            raise ValueError("layers_to_transform needs target_modules to be a list of names")
        return self


class Lora(_Layered):
    """Low-rank adapters: the base stays frozen and the output is an adapter (https://arxiv.org/abs/2106.09685)."""

    quantizable = True

    r: int = Field(default=8, ge=1, description="rank of each adapter")
    alpha: int = Field(default=16, ge=1, description="scale: updates are multiplied by alpha / r")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout on the adapters' input while training"
    )
    rslora: bool = Field(
        default=False, description="scale by alpha / sqrt(r) (https://arxiv.org/abs/2312.03732)"
    )
    dora: bool = Field(
        default=False, description="learn magnitudes apart from directions (https://arxiv.org/abs/2402.09353)"
    )
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = Field(
        default="default",
        description="first values: A random and B zero; A gaussian and B zero; orthogonal halves whose product is "
        "zero; principal singular vectors of the weights (https://arxiv.org/abs/2404.02948), or their QR factors "
        "(https://arxiv.org/abs/2406.01775), which are saved as an adapter of rank 2r on the unchanged base",
    )
    pissa_niter: int | None = Field(
        default=None, ge=0, description="iterations of a fast, approximate decomposition; unset: an exact one"
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="biases of the base to train: none, all, or those of adapted modules"
    )
    trainable_tokens: list[str] = Field(
        default=[], description="tokens whose embeddings are trained, such as newly added ones"
    )

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if self.pissa_niter is not None and self.init != "pissa":
            raise ValueError("pissa_niter would be ignored: init is not `pissa`")
        if self.init == "orthogonal" and self.r % 2:
            raise ValueError("init `orthogonal` needs an even r")
        return self

    def size(self, inputs: int, outputs: int) -> int:
        """Return r · (inputs + outputs), and DoRA's magnitudes."""
        return self.r * (inputs + outputs) + self.dora * outputs


class Loha(_Layered):
    """Hadamard product of two low-rank updates (https://arxiv.org/abs/2108.06098)."""

    method: Literal["loha"] = Field(description="which method")
    r: int = Field(default=8, ge=1, description="rank of each factor; that of the update is up to r²")
    alpha: int = Field(default=8, ge=1, description="scale: updates are multiplied by alpha / r")

    def size(self, inputs: int, outputs: int) -> int:
        """Return the size of two low-rank updates."""
        return 2 * self.r * (inputs + outputs)


class Lokr(_Layered):
    """Kronecker product of a small matrix and a low-rank one (https://arxiv.org/abs/2309.14859)."""

    method: Literal["lokr"] = Field(description="which method")
    r: int = Field(default=8, ge=1, description="rank of the larger factor, where it is decomposed at all")
    alpha: int = Field(default=8, ge=1, description="scale: updates are multiplied by alpha / r")

    def size(self, inputs: int, outputs: int) -> int:
        """Return the size of factors whose sides are about the square roots of the layer's."""
        return isqrt(inputs * outputs) + self.r * (isqrt(inputs) + isqrt(outputs))


class Oft(_Layered):
    """Block-wise rotations of a layer's input (https://arxiv.org/abs/2306.07280)."""

    quantizable = True

    method: Literal["oft"] = Field(description="which method")
    block_size: int = Field(
        default=32, ge=2, description="width of a rotated block; must divide the inputs of every layer"
    )

    def size(self, inputs: int, outputs: int) -> int:
        """Return the free values of inputs / block_size skew-symmetric blocks."""
        return inputs * (self.block_size - 1) // 2


class Ia3(_Placed):
    """Learned scales of keys, values and feed-forward inputs (https://arxiv.org/abs/2205.05638)."""

    quantizable = True

    method: Literal["ia3"] = Field(description="which method")
    target_modules: str | list[str] | None = Field(  # type: ignore[assignment]
        default=None,
        min_length=1,
        description="suffixes of the scaled modules; unset: those known for the architecture",
    )
    feedforward_modules: list[str] = Field(
        default=[], description="those of `target_modules` whose input, and not output, is scaled"
    )

    @model_validator(mode="after")
    def _scaled_inputs_are_targets(self) -> Self:
        others = set(self.feedforward_modules) - set(self.target_modules or ())
        if others:
            raise ValueError(f"feedforward_modules must stand in target_modules: {', '.join(sorted(others))}")
        return self


class Vera(_Layered):
    """Scales around shared random matrices, which are saved too (https://arxiv.org/abs/2310.11454)."""

    quantizable = True

    method: Literal["vera"] = Field(description="which method")
    r: int = Field(default=256, ge=1, description="rank of the shared matrices")
    d_initial: float = Field(default=0.1, description="first value of the inner scales")

    def size(self, inputs: int, outputs: int) -> int:
        """Return the two vectors of scales."""
        return self.r + outputs


class Hra(_Layered):
    """A chain of Householder reflections of a layer's input (https://arxiv.org/abs/2405.17484)."""

    method: Literal["hra"] = Field(description="which method")
    r: int = Field(
        default=8, ge=2, multiple_of=2, description="reflections; even, so that they cancel at first"
    )

    def size(self, inputs: int, outputs: int) -> int:
        """Return one vector for each reflection."""
        return self.r * inputs


class Miss(_Layered):
    """One small matrix, shared by shards of the input (https://arxiv.org/abs/2409.15371)."""

    method: Literal["miss"] = Field(description="which method")
    r: int = Field(default=64, ge=1, description="rank of the update")

    def size(self, inputs: int, outputs: int) -> int:
        """Return the one matrix."""
        return self.r * outputs


class Delora(_Layered):
    """Low-rank updates with normalized components and a learned norm (https://arxiv.org/abs/2503.18225)."""

    method: Literal["delora"] = Field(description="which method")
    r: int = Field(default=8, ge=1, description="rank of each adapter")
    delora_lambda: int = Field(default=15, ge=1, description="first value of the bound on an update's norm")

    def size(self, inputs: int, outputs: int) -> int:
        """Return both factors and the norm."""
        return self.r * (inputs + outputs) + 1


class Hira(_Layered):
    """The base weight times a low-rank matrix, element by element (https://openreview.net/forum?id=TwJrTz9cRS)."""

    method: Literal["hira"] = Field(description="which method")
    r: int = Field(default=32, ge=1, description="rank of the factor; that of the update may be full")

    def size(self, inputs: int, outputs: int) -> int:
        """Return both factors."""
        return self.r * (inputs + outputs)


OtherAdapter = Delora | Hira | Hra | Ia3 | Loha | Lokr | Miss | Oft | Vera
Peft = Annotated[OtherAdapter, Field(discriminator="method")]
"""Adapters that are not LoRA; `method` says which."""
Adapter = Lora | OtherAdapter


class Quantization(Config):
    """The frozen base in 4 or 8 bits, by bitsandbytes, while an adapter is trained (https://arxiv.org/abs/2305.14314)."""

    bits: Literal[4, 8] = Field(
        default=4, description="bits of a weight; 8: integers with a scale for each output"
    )
    type: Literal["nf4", "fp4"] = Field(
        default="nf4", description="levels of 4 bits: quantiles of a normal distribution, or floats"
    )
    double: bool = Field(default=True, description="quantize the scales of 4-bit blocks as well")

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        changed = [name for name in ("type", "double") if getattr(self, name) != _default(type(self), name)]
        if self.bits == 8 and changed:
            raise ValueError(f"{', '.join(changed)} would be ignored: 8 bits have one kind of levels")
        return self


def _default(model: type[Config], option: str) -> object:
    return model.model_fields[option].default


def adapter_size(adapter: Adapter, layers: int, width: int, embeddings: int) -> int:
    """Return roughly how many parameters are trained, in layers of usual shapes.

    Args:
        adapter: The options; by default every linear layer but the head has an adapter.
        layers: Layers of the model, each with four attention and three feed-forward projections.
        width: Inputs of an attention projection; the feed-forward part is four times as wide.
        embeddings: Rows of the input embedding and of the head.
    """
    shapes = [(1, 1)] * 4 + [(1, 4), (1, 4), (4, 1)]
    adapted = len(getattr(adapter, "layers_to_transform", ())) or layers
    small = adapted * sum(adapter.size(inputs * width, outputs * width) for inputs, outputs in shapes)
    whole = sum(name.endswith(("embed_tokens", "wte", "lm_head")) for name in adapter.modules_to_save)
    tokens = len(getattr(adapter, "trainable_tokens", ()))
    return small + (whole * embeddings + tokens) * width
