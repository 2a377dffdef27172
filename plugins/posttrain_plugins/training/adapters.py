"""Putting a fresh adapter on a frozen model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import StageError
from posttrain_plugins.models.adapters import adapter_state, tolerated
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.head.value import HEADS
from posttrain_plugins.training.peft_options import (
    ALL_LINEAR,
    REWRITING,
    Adapter,
    Delora,
    Hira,
    Hra,
    Ia3,
    Loha,
    Lokr,
    Lora,
    Miss,
    Oft,
    Vera,
)
from posttrain_plugins.training.vision import Vision

START = 1e-4
"""Largest change of a logit by a fresh adapter, as a share of the largest logit: rounding, and no more."""
POLICY_TASK = "CAUSAL_LM"
"""What peft calls what a policy does."""
PROBE = 8
"""Tokens that a fresh adapter is tried on."""


@dataclass(frozen=True)
class Adapted:
    """A model with a fresh adapter.

    Args:
        model: The peft model; everything but the adapter is frozen.
        initial: First values of an adapter that was taken out of the base weights. It is saved relative to
            them, so that it fits the base as it was. None where the base is unchanged.
    """

    model: Any
    initial: Mapping[str, Tensor] | None = None


def with_adapter(
    model: Any,
    adapter: Adapter,
    token_id: Callable[[str], int | None] | None = None,
    task: str = POLICY_TASK,
    vision: Vision | None = None,
) -> Adapted:
    """Put a fresh adapter on a model. What the model computes does not change by that, only what is trained.

    Args:
        model: A transformers model.
        adapter: What to put on it, and where.
        token_id: Looks up the names in `trainable_tokens`.
        task: What peft calls what the model does; of a model that gives numbers the head is trained and saved whole.
        vision: The parts of the model that see; where they stay frozen they get no adapter.

    Raises:
        StageError: The adapter does not fit the model, or an option would be ignored.
    """
    from peft import get_peft_model

    _require_named_modules(model, adapter)
    before = _logits(model)
    model.requires_grad_(False)
    try:
        config = _config(adapter, token_id, task, vision)
        with tolerated():
            adapted = get_peft_model(model, config)
        if vision is not None:
            vision.freeze(adapted)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _misfit(str(error), "name modules that the model has, or another method") from error
    _require_same_start(before, _logits(adapted))
    if not (isinstance(adapter, Lora) and adapter.init in REWRITING):
        return Adapted(adapted)
    initial = {name: tensor.clone() for name, tensor in adapter_state(adapted).items() if ".lora_" in name}
    _require_full_rank(initial, adapter.r)
    return Adapted(adapted, initial)


def _config(
    adapter: Adapter, token_id: Callable[[str], int | None] | None, task: str, vision: Vision | None
) -> Any:
    import peft

    placement = _placement(adapter, task, vision)
    if isinstance(adapter, Lora):
        return peft.LoraConfig(task_type=task, **placement, **_lora(adapter, token_id))
    name, renamed, fixed = _CONFIGS[type(adapter)]
    if not hasattr(peft, name):
        raise StageError(f"the installed peft has no {name}", found=peft.__version__, fix="upgrade peft")
    own = {key: value for key, value in adapter.model_dump().items() if key not in {"method", *_PLACEMENT}}
    options = {renamed.get(key, key): value for key, value in own.items()}
    return getattr(peft, name)(task_type=task, **placement, **options, **fixed)


_PLACEMENT = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")

_CONFIGS: Mapping[type[Adapter], tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    Delora: ("DeloraConfig", {}, {}),
    Hira: ("HiraConfig", {}, {}),
    Hra: ("HRAConfig", {}, {}),
    Ia3: ("IA3Config", {}, {}),
    Loha: ("LoHaConfig", {}, {}),
    Lokr: ("LoKrConfig", {}, {}),
    Miss: ("MissConfig", {}, {}),
    # Exact rotations: peft's series for them changed between its versions.
    Oft: ("OFTConfig", {"block_size": "oft_block_size"}, {"use_cayley_neumann": False}),
    Vera: ("VeraConfig", {}, {}),
}
"""peft's config class of each method, the options that have another name there, and what is not left to peft."""


def _placement(adapter: Adapter, task: str, vision: Vision | None) -> dict[str, Any]:
    """Return where the adapter goes, without what is left to peft.

    A head that gives numbers is trained whole: of some tasks peft would count it among all linear layers.
    """
    given = {name: getattr(adapter, name, None) for name in _PLACEMENT}
    if task != POLICY_TASK and given["target_modules"] == ALL_LINEAR:
        given["exclude_modules"] = [*(given["exclude_modules"] or ()), *HEADS]
    if vision is not None and vision.pattern is not None:
        given["exclude_modules"] = _or_any(vision.pattern, given["exclude_modules"] or ())
    return {name: value for name, value in given.items() if value}


def _or_any(pattern: str, suffixes: Sequence[str]) -> str:
    """Return one regular expression for whole paths: those of the pattern, and those with one of the suffixes."""
    return f"{pattern}|(?:.*\\.)?(?:{'|'.join(map(re.escape, suffixes))})" if suffixes else pattern


def _lora(lora: Lora, token_id: Callable[[str], int | None] | None) -> dict[str, Any]:
    init = True if lora.init == "default" else lora.init
    return {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": lora.bias,
        "init_lora_weights": init if lora.pissa_niter is None else f"pissa_niter_{lora.pissa_niter}",
        "trainable_token_indices": _token_ids(lora.trainable_tokens, token_id) or None,
    }


def _token_ids(names: Sequence[str], token_id: Callable[[str], int | None] | None) -> list[int]:
    found = {name: None if token_id is None else token_id(name) for name in names}
    unknown = [name for name, id in found.items() if id is None]
    if unknown:
        raise StageError(
            "the tokenizer has no such token",
            where="lora.trainable_tokens",
            found=", ".join(map(repr, unknown)),
            fix="name tokens as they stand in the vocabulary",
        )
    return sorted(id for id in found.values() if id is not None)


def _require_named_modules(model: Any, adapter: Adapter) -> None:
    """Refuse names that match nothing: peft is content when one of several does."""
    paths = [path for path, _ in model.named_modules()]
    names = {
        option: value
        for option in ("target_modules", "exclude_modules", "modules_to_save")
        if (value := getattr(adapter, option)) and value != ALL_LINEAR
    }
    for option, suffixes in names.items():
        for suffix in suffixes:
            if not any(path == suffix or path.endswith(f".{suffix}") for path in paths):
                raise _misfit(f"`{suffix}` in {option} names no module", "name modules that the model has")
    numbers = {int(number) for path in paths for number in re.findall(r"\.(\d+)(?=\.|$)", path)}
    absent = sorted(set(getattr(adapter, "layers_to_transform", ())) - numbers)
    if absent:
        raise _misfit(f"there is no layer {absent[0]} for layers_to_transform", "count the layers from 0")


def _logits(model: Any) -> Tensor:
    """Run the model on the first few tokens of its vocabulary."""
    device = next(model.parameters()).device
    tokens = torch.arange(PROBE, device=device)[None] % model.get_input_embeddings().weight.shape[0]
    with evaluating(model):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return logits


def _require_same_start(before: Tensor, after: Tensor) -> None:
    change = float((after - before).abs().max())
    if change > START * float(before.abs().max().clamp(min=1.0)):
        raise _misfit(
            f"untrained, it changes logits by {change:.2g}",
            "choose another initialization: this one does not suit the model's layers",
        )


def _require_full_rank(initial: Mapping[str, Tensor], rank: int) -> None:
    """Refuse layers with fewer directions than the rank: peft would save matrices that it cannot load."""
    for name, tensor in initial.items():
        if ".lora_A" in name and tensor.shape[0] != rank:
            raise _misfit(
                f"{name.removesuffix('.lora_A.weight')} has {tensor.shape[0]} directions, and r is {rank}",
                "lower r, or use another initialization",
            )


def _misfit(found: str, fix: str) -> StageError:
    return StageError("the adapter does not fit the model", where="lora or peft", found=found, fix=fix)
