"""Exact attention for a row of segments, as an attention and a mask function of transformers.

While a row's plan is current, the mask function of the model's decoder returns a `Pattern` in place of a mask;
the decoder hands it on to its layers as it would a mask, and the attention function computes block by block what
it says. The plan is current during the forward pass only: where activations are recomputed in the backward pass,
a layer is called again with the pattern it was given, as that is an argument like any other, whatever wraps the
model. Where no plan is current both functions do what transformers' own do.

Flash and flex attention (GPU only; not run by the tests) keep their own functions: from positions that restart
they see where a sequence begins, which is all that packed rows need.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from posttrain.errors import StageError
from posttrain_plugins.training.layouts.blocks import Plan, plan
from posttrain_plugins.training.microbatch import MicroBatch
from posttrain_plugins.training.processor import with_plain_products

Forward = Callable[..., tuple[Tensor, Tensor | None]]

OURS = {"sdpa": "posttrain_sdpa", "eager": "posttrain_eager"}
"""What each of transformers' attention implementations is replaced by."""
BY_POSITION = ("flash", "flex")
"""What implementations that tell packed sequences apart by themselves begin with."""
LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers for which segments and positions say all about what a token sees."""

_current: ContextVar[Plan | None] = ContextVar("plan", default=None)


@dataclass(frozen=True)
class Pattern:
    """What takes the place of a mask: the row's plan, and how many positions a layer looks back."""

    plan: Plan
    window: int | None


def refused(reason: str) -> StageError:
    """Return the error for a model whose attention cannot be laid out."""
    return StageError(
        f"this model cannot attend by segments: {reason}",
        where="layout",
        expected="causal attention, full or with a sliding window, through transformers' attention interface",
        fix="use the layout `padded`",
    )


@contextmanager
def attending(model: nn.Module, micro: MicroBatch, *, trees: bool) -> Iterator[None]:
    """Make forward passes of a model attend by segments.

    Args:
        model: A model of transformers, possibly inside of wrappers and adapters.
        micro: Its segments are what counts; without any nothing changes.
        trees: Whether segments may continue others.

    Raises:
        StageError: The model does not get its attention from transformers' interface.
    """
    if micro.segments is None or not prepare(model, trees=trees):
        yield
        return
    token = _current.set(plan(micro.segments, micro.tokens.device))
    hooks = [] if micro.pixels is None else _beside(model)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _current.reset(token)


def _beside(model: nn.Module) -> list[Any]:
    """Keep the plan from what looks at images: it sees each of them whole, and no row of tokens."""
    outer, *inner = parts(model)
    seeing = getattr(outer.config, "vision_config", None)
    before: list[Any] = []
    hooks: list[Any] = []
    for module in (each for each in inner if each.config is seeing):
        hooks.append(module.register_forward_pre_hook(lambda *_: before.append(_current.set(None))))
        hooks.append(module.register_forward_hook(lambda *_: _current.reset(before.pop())))
    return hooks


def parts(model: nn.Module) -> list[PreTrainedModel]:
    """Return the model of transformers and those that it is made of, the outermost first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


_prepared: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""The configurations of models that are known to be fit."""


def prepare(model: nn.Module, *, trees: bool) -> bool:
    """Have a model call the functions below; it keeps doing so, as a backward pass may need them.

    Returns:
        Whether it does; False where its implementation tells sequences apart by itself.
    """
    configs = _prepared.get(model)
    if configs and all(config._attn_implementation in OURS.values() for config in configs):
        return True
    models = parts(model)
    if not models:
        raise refused("it is none of transformers'")
    name = models[0].config._attn_implementation or "eager"
    if name.startswith(BY_POSITION):
        if trees:
            raise refused(f"`{name}` knows nothing of shared prefixes")
        return False
    _check(models)
    if name not in OURS.values():
        if name not in OURS:
            raise refused(f"its attention implementation is `{name}`")
        models[0].set_attn_implementation(OURS[name])
    _prepared[model] = [each.config for each in models]
    return True


@contextmanager
def keeping_implementation(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give a model its attention implementation back in the end, unless the function yielded is called."""
    models, kept = parts(model), []
    before = [(each.config, each.config._attn_implementation) for each in models]
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            for config, name in before:
                config._attn_implementation_internal = name


def _check(models: list[PreTrainedModel]) -> None:
    for each in models:
        if not each._can_set_attn_implementation():
            raise refused(f"{type(each).__name__} has an attention of its own")
        config = each.config.get_text_config()
        other = set(getattr(config, "layer_types", None) or ()) - LAYERS
        if other or getattr(config, "attention_chunk_size", None):
            raise refused(f"it has layers of the kind {', '.join(sorted(other)) or 'chunked_attention'}")


def _masking(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mask function that returns a pattern where a plan is current."""

    def mask(*args: Any, **given: Any) -> Any:
        current = _current.get()
        if current is None:
            return stock(*args, **given)
        if given.get("use_vmap") or "allow_is_bidirectional_skip" in given:
            raise refused("its mask is not causal alone")
        size = given["batch_size"] * given["q_length"]
        if not size == given["batch_size"] * given["kv_length"] == len(current.back):
            raise refused(f"it attends over {size} tokens of a row of {len(current.back)}")
        return Pattern(current, given.get("local_size"))

    return mask


def _attention(
    stock: Callable[[nn.Module], Forward], core: Callable[[nn.Module], Forward], dense: bool
) -> Forward:
    """Return an attention function that follows patterns and leaves all else to transformers' own.

    Args:
        stock: Gives transformers' own for an attention module.
        core: Gives the one for dense blocks.
        dense: Whether that wants a mask even where the block is just causal.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mask = attention_mask
        if not isinstance(mask, Pattern):
            if _current.get() is not None:
                raise refused(f"{type(module).__name__} makes its own mask")
            return stock(module)(module, query, key, value, mask, *args, **given)
        if given.get("position_bias") is not None or not getattr(module, "is_causal", True):
            raise refused(f"{type(module).__name__} is not causal alone")
        return _blockwise(core(module), module, (query, key, value), mask, dense, args, given), None

    return attention


def _blockwise(
    core: Forward,
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    pattern: Pattern,
    dense: bool,
    args: tuple[Any, ...],
    given: dict[str, Any],
) -> Tensor:
    """Gather each block's queries, keys and values, attend, and bring the results back: [B, T, heads, D]."""
    layout = pattern.plan
    asked = [block.count * block.queries for block in layout.blocks]
    seen = [block.count * block.keys for block in layout.blocks]
    index = ((layout.queries, asked), (layout.keys, seen), (layout.keys, seen))
    pieces = [
        torch.split(_rows(each).index_select(0, at), sizes)
        for each, (at, sizes) in zip(states, index, strict=True)
    ]
    results = []
    for number, (block, query, *others) in enumerate(zip(layout.blocks, *pieces, strict=True)):
        mask = None
        if dense or not block.causal(pattern.window):
            mask = layout.mask(number, pattern.window, query.dtype)
        heads = [each.view(block.count, -1, *each.shape[1:]).transpose(1, 2) for each in (query, *others)]
        result, _ = core(module, *heads, mask, *args, **given)
        results.append(result.flatten(0, 1))
    joined = results[0] if len(results) == 1 else torch.cat(results)
    rows, _, tokens, _ = states[0].shape
    return joined.index_select(0, layout.back).view(rows, tokens, *joined.shape[1:])


def _rows(states: Tensor) -> Tensor:
    """From [B, heads, T, D] to [B·T, heads, D]."""
    return states.transpose(1, 2).flatten(0, 1)


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend in a block: [count, heads, Q, D] to [count, Q, heads, D]; a causal mask if there is none."""
    if given.get("softcap") is not None:
        raise refused("`sdpa` has no softcap")
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.device.type != "cpu":
        # With a mask the fast kernels of other devices do not take grouped heads.
        key, value, groups = repeat_kv(key, groups), repeat_kv(value, groups), 1
    attend = partial(
        scaled_dot_product_attention,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=groups > 1,
    )
    return with_plain_products(attend, query, key, value).transpose(1, 2), None


def _eager(module: nn.Module) -> Forward:
    """Return the plain attention that the model's own module defines, which knows softcaps, sinks and the like."""
    for each in type(module).__mro__:
        forward = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if forward is not None:
            return forward  # type: ignore[no-any-return]
    raise refused(f"{type(module).__name__} has no plain attention to call")


AttentionMaskInterface.register(OURS["sdpa"], _masking(sdpa_mask))
AttentionMaskInterface.register(OURS["eager"], _masking(eager_mask))
AttentionInterface.register(
    OURS["sdpa"], _attention(lambda _: sdpa_attention_forward, lambda _: _sdpa, dense=False)
)
AttentionInterface.register(OURS["eager"], _attention(_eager, _eager, dense=True))
