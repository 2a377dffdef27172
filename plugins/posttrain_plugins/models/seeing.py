"""Heads for numbers on models that see.

transformers has classes of that kind for few of them. The others are made here of its own parts; no code comes out of a
model's directory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from posttrain_plugins.training.head.value import value_parts

SEEING = "ForConditionalGeneration"
"""How the names of models that see and write end."""


def class_with_head(config: Any, suffix: str) -> Any | None:
    """Return the class that puts a head for numbers on the last hidden states of a model that sees.

    Args:
        config: The model's config.
        suffix: What the class is for: `ForSequenceClassification` or `ForTokenClassification`.

    Returns:
        A class of transformers' kind, or None where transformers has one of its own, or the model does not see.
    """
    from transformers.models.auto import modeling_auto as auto

    own = {
        "ForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "ForTokenClassification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    }
    writes = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if type(config) in own[suffix] or getattr(config, "vision_config", None) is None or writes is None:
        return None
    return _made(writes, suffix)


def with_trunk(made: Any, policy: Any) -> Any:
    """Return a model of some class around the very trunk of a policy in memory; its head holds nothing yet."""
    with torch.device("meta"):
        model = made(policy.config)
    setattr(model, model.base_model_prefix, policy.base_model)
    _, head = value_parts(model)
    head.to(policy.dtype).to_empty(device=policy.device)
    return model


@cache
def _made(writes: type, suffix: str) -> type:
    from transformers import modeling_layers

    base = next(each for each in writes.__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = writes.__name__.removesuffix(SEEING) + suffix
    return type(name, (getattr(modeling_layers, f"Generic{suffix}"), base), {"__module__": __name__})
