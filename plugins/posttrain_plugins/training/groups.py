"""Which parameters get which learning rate and weight decay, and the optimizer over them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import nn

from posttrain.errors import StageError
from posttrain_plugins.training.optimizers import OPTIMIZERS
from posttrain_plugins.training.options import TrainingOptions

_SHOWN = 8
"""How many names of parameters a message lists."""


def make_optimizer(
    model: nn.Module,
    config: TrainingOptions,
    arguments: transformers.TrainingArguments,
    decayed: Collection[str],
) -> torch.optim.Optimizer:
    """Make the optimizer that the options name, over the model's trainable parameters.

    Args:
        model: The policy, possibly wrapped.
        config: The trainer's options.
        arguments: The same for transformers, which knows the classes.
        decayed: Names of the parameters that weight decay applies to.

    Raises:
        StageError: The optimizer's package is missing, or the learning rates do not fit the parameters.
    """
    about = OPTIMIZERS[config.optim]
    if about.package is not None and find_spec(about.package) is None:
        raise StageError(
            f"optim `{config.optim}` needs {about.package}",
            where="optim",
            found=f"{about.package} is not installed",
            fix="install `posttrain[quant]`, or use adamw_torch_fused",
        )
    groups = parameter_groups(model, config, decayed)
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    if about.bits == 8:
        _keep_embeddings_exact(model)
    optimizer: torch.optim.Optimizer = kind(groups, **options)
    if config.fp16:
        # Fused AdamW would skip an overflow on its own, and nobody would hear of it.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer


def parameter_groups(
    model: nn.Module, config: TrainingOptions, decayed: Collection[str]
) -> list[dict[str, Any]]:
    """Return two groups, with and without weight decay, for each learning rate: the general one, then the others.

    Groups and the parameters in them follow the order of the options and of the model, so that the state of an
    optimizer finds its parameters again on resume. Only the first two may be empty.
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    chosen = _chosen([name for name, _ in named], config.learning_rate_groups)
    rates: list[tuple[str | None, float]] = [
        (None, config.learning_rate),
        *config.learning_rate_groups.items(),
    ]
    groups = [
        {
            "name": f"{pattern or 'all'}, {'decay' if decays else 'no decay'}",
            "params": [
                weight
                for name, weight in named
                if chosen.get(name) == pattern and (name in decayed) is decays
            ],
            "lr": rate,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for pattern, rate in rates
        for decays in (True, False)
    ]
    return [group for index, group in enumerate(groups) if index < 2 or group["params"]]


def _chosen(names: Sequence[str], rates: Mapping[str, float]) -> dict[str, str]:
    """Return the pattern that each name matches, where one does."""
    chosen: dict[str, str] = {}
    for pattern in rates:
        matching = [name for name in names if re.search(pattern, name)]
        if not matching:
            raise StageError(
                "a learning rate is for no parameter",
                where=f"learning_rate_groups.{pattern}",
                found=f"trainable parameters {_some(names)}",
                fix="write a regular expression that is found in the name of some trainable parameter",
            )
        twice = [name for name in matching if name in chosen]
        if twice:
            raise StageError(
                "a parameter has two learning rates",
                where=f"learning_rate_groups.{pattern}",
                found=f"{_some(twice)}, by `{chosen[twice[0]]}` too",
                fix="write regular expressions that do not overlap",
            )
        chosen.update(dict.fromkeys(matching, pattern))
    return chosen


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _keep_embeddings_exact(model: nn.Module) -> None:
    """Give embeddings 32-bit moments, as transformers does: their rows see too few gradients for 8 bits.

    What earlier trainings of the process asked for by the places of their parameters is forgotten.
    """
    from bitsandbytes import optim

    manager = optim.GlobalOptimManager.get_instance()
    manager.initialize()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
