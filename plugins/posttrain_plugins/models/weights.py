"""What a config promises of the weights, and what of that the files do not hold. Reads headers alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
"""What DistributedDataParallel, torch.compile and peft put before every name."""
_LM_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_SCORES = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "v_head.summary.weight")
_HEADS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": _LM_HEADS,
    "ForSequenceClassification": _SCORES,
    "ForTokenClassification": _SCORES,
}
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "partial_rotary_factor",
    "logit_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
_ROPE = ("rope_theta", "rope_type", "factor")
_NAMED = 5


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide what the weights compute, as far as a config states them.

    Configs of different age spell rotary embeddings differently, and leave out what they take for the default; so
    two shapes compare where both say something.
    """
    found = {name: config[name] for name in _SHAPE if config.get(name) is not None}
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope.setdefault("rope_type", rope.get("type"))
    return found | {
        f"rope.{name}".replace("rope.rope_", "rope."): rope[name] for name in _ROPE if _plain(rope.get(name))
    }


def missing(config: Mapping[str, Any], names: Collection[str], layers: int | None) -> tuple[str, ...]:
    """Return weights that the config promises and that no file holds; each would start from random numbers.

    Args:
        config: The whole content of `config.json`.
        names: The tensors that there are.
        layers: How many layers the config speaks of.
    """
    found = [*_wrapped(names), *_layers(names, layers), *_head(config, names)]
    return tuple(found[:_NAMED])


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _wrapped(names: Collection[str]) -> Iterator[str]:
    for name in sorted(names):
        for prefix in _WRAPPERS:
            if name.startswith(prefix) and name.removeprefix(prefix) not in names:
                yield name.removeprefix(prefix)


def _layers(names: Collection[str], layers: int | None) -> Iterator[str]:
    there = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    if there and layers is not None:
        yield from (f"layers.{index}" for index in range(layers) if index not in there)


def _head(config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    head = next(iter(config.get("architectures") or ()), "")
    wanted = next((tensors for ending, tensors in _HEADS.items() if head.endswith(ending)), ())
    tied = wanted == _LM_HEADS and config.get("tie_word_embeddings") is not False
    if wanted and not tied and not any(name.endswith(wanted) for name in names):
        yield wanted[0]
