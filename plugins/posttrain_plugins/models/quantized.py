"""Models whose frozen weights are held in few bits, by bitsandbytes: opened, computed with, and made whole again."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import StageError
from posttrain_plugins.models.artifact import QUANTIZATION, write_config

if TYPE_CHECKING:
    from posttrain_plugins.training.peft_options import Quantization


def bits_of(quantization: Quantization, dtype: str, whole: Sequence[str] = ()) -> Any:
    """Return what transformers has to know to open a model in few bits.

    Args:
        quantization: How to hold the weights.
        dtype: Precision to compute in.
        whole: Modules that stay whole; those that transformers spares, where left out.

    Raises:
        StageError: bitsandbytes is not installed.
    """
    import torch
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise StageError("quantization needs bitsandbytes", fix="install `posttrain[quant]`")
    if quantization.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(whole) or None)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=list(whole) or None,
    )


def keep_exact(model: Any) -> None:
    """Let quantized layers compute with their rounded weights and nothing else, forwards and backwards.

    On CPUs with bfloat16 instructions bitsandbytes repacks weights of 4 bits when they are first used without
    gradients, and the packed product has no backward pass: a training that had evaluated first would get no gradient
    through it. Its layers of 8 bits round their inputs too, in whole micro-batches, so that what a row gives would
    depend on the rows beside it.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        # What is quantized otherwise is none of it.
        return
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    from posttrain_plugins.models.linear8bit import Linear8bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt):
            module.__class__ = Linear8bit


def is_quantized(model: Any) -> bool:
    """Whether some of a model's weights are held in few bits."""
    return getattr(model.config, "quantization_config", None) is not None


def dequantized(model: Any) -> Any:
    """Return a quantized model with whole weights in float32: the rounded ones that it computes with."""
    import torch
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        whole = model.dequantize(dtype=torch.float32)
    finally:
        logging.set_verbosity(before)
    return whole.float().eval()


def record(directory: Path, quantization: Quantization | None) -> None:
    """Write beside an adapter how its base was held; nothing where it was whole."""
    if quantization is not None:
        write_config(directory / QUANTIZATION, recorded(quantization))


def recorded(quantization: Quantization) -> dict[str, Any]:
    """Return what is recorded of options: those that mean something for the number of bits."""
    options = quantization.model_dump(mode="json")
    return options if quantization.bits == 4 else {"bits": options["bits"]}
