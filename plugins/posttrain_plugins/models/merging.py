"""What `model.merge` does: one model in memory at a time, merged in float32, saved, opened again and compared."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.artifacts.kinds import Kind, MergeFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models import probe
from posttrain_plugins.models.adapters import merged, open_adapter, tolerated
from posttrain_plugins.models.artifact import CONFIG, facts_of
from posttrain_plugins.models.merge import ADAPTER, MODEL, MergeConfig
from posttrain_plugins.models.policy import load_model, save_policy, usable_device
from posttrain_plugins.models.quantized import dequantized, is_quantized
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json
from posttrain_plugins.training.peft_options import Quantization

MERGED = 1e-4
"""Largest difference of a logit between merged and unmerged in float32, as a share of the largest logit: rounding of
sums in another order."""
ROUNDED = {"float32": MERGED, "bfloat16": 0.1, "float16": 0.02}
"""The same between what is saved and what was merged, by precision."""

Logits = list[Tensor]


@dataclass(frozen=True)
class _Said:
    """Logits of a probe by an adapter on its base, and the largest difference of a logit to the base alone."""

    logits: Logits
    effect: float


def run(context: StageContext) -> Outcome:
    """Merge, save, open again and compare.

    Raises:
        StageError: The base is quantized and is not to be dequantized, or merging changed what is computed.
        StoreError: The adapter does not say what its base is.
    """
    config: MergeConfig = context.config
    adapter = context.input(ADAPTER)
    base, rounding = _base(context, adapter), _quantization(adapter)
    if config.into == "dequantized" and rounding is None and not _held_quantized(base):
        raise StageError(
            "there is nothing to dequantize",
            where=adapter.ref,
            found="an adapter that was trained on its base as it is",
            fix="leave `into` out",
        )
    sequences = probe.probe_of(Encoder.open(adapter.path), adapter.facts.context)
    trained = None if rounding is None else _said(_adapted(base, adapter, rounding), sequences)
    model = _mergeable(base, adapter, rounding, config.into)
    said = _said(model, sequences)
    model = merged(model)
    now = probe.logits_of(model, sequences)
    exact = _require_same(
        said.logits, now, MERGED, "merging changed what is computed", "keep the adapter on its base"
    )
    _save(context, model, adapter, config)
    del model
    gc.collect()
    saved = probe.logits_of(load_model(context.output(MODEL), "float32").to(usable_device()), sequences)
    what = f"the weights as saved in {config.dtype} compute something else than the merged ones"
    rounded = _require_same(now, saved, ROUNDED[config.dtype], what, "choose a wider `dtype`")
    figures = {"merge_gap": exact, "rounding_gap": rounded}
    return _outcome(context, trained or said, trained is not None, saved, figures)


def _base(context: StageContext, adapter: Artifact) -> Artifact:
    if adapter.facts.base is None:
        raise StoreError("the adapter does not say which model it belongs to", where=adapter.ref)
    return context.artifact(adapter.facts.base)


def _quantization(adapter: Artifact) -> Quantization | None:
    recorded = adapter.facts.quantization
    return None if recorded is None else Quantization(**recorded)


def _held_quantized(base: Artifact) -> bool:
    return "quantization_config" in read_json(base.path / CONFIG)


def _adapted(base: Artifact, adapter: Artifact, quantization: Quantization) -> Any:
    """Open the adapter on its base as it was trained."""
    model = load_model(base.path, "float32", quantization=quantization)
    return open_adapter(model, adapter.path, trainable=False).to(usable_device())


def _mergeable(base: Artifact, adapter: Artifact, rounding: Quantization | None, into: str) -> Any:
    """Open the adapter on whole weights in float32: those of the store, or rounded ones that are made whole again."""
    model = load_model(base.path, "float32", quantization=rounding if into == "dequantized" else None)
    if is_quantized(model) and into == "base":
        raise StageError(
            "an adapter is not merged into quantized weights: they would be rounded once more",
            where=base.ref,
            found="a base with `quantization_config` in its config",
            fix="set `into: dequantized`",
        )
    whole = dequantized(model) if is_quantized(model) else model
    return open_adapter(whole, adapter.path, trainable=False).to(usable_device())


def _said(model: Any, sequences: list[list[int]]) -> _Said:
    logits = probe.logits_of(model, sequences)
    with tolerated(), model.disable_adapter():
        return _Said(logits, probe.gap(logits, probe.logits_of(model, sequences)))


def _require_same(before: Logits, after: Logits, tolerance: float, message: str, fix: str) -> float:
    """Return the largest difference of a logit, if it is small enough beside the largest logit."""
    found, allowed = probe.gap(before, after), tolerance * max(1.0, probe.size(before))
    if not found <= allowed:
        raise StageError(
            message,
            where=MODEL,
            found=f"a logit that differs by {found:.3g}",
            expected=f"at most {allowed:.3g}",
            fix=fix,
        )
    return found


def _save(context: StageContext, model: Any, adapter: Artifact, config: MergeConfig) -> None:
    import torch

    save_policy(context.output(MODEL), model.to("cpu", getattr(torch, config.dtype)), adapter.path)


def _outcome(
    context: StageContext, was: _Said, rounded: bool, saved: Logits, figures: Mapping[str, float]
) -> Outcome:
    """Tell how far what was saved is from what was trained."""
    gap = probe.gap(was.logits, saved)
    if rounded:
        context.note(
            f"the adapter was trained on a base in few bits: the merged model's logits differ from that policy's by "
            f"up to {gap:.3g}, and the adapter had changed them by up to {was.effect:.3g}"
        )
    beyond = gap > MERGED * max(1.0, probe.size(was.logits))
    told = MergeFacts(gap=_brief(gap) if beyond else 0.0, effect=_brief(was.effect))
    facts = facts_of(context.output(MODEL)).model_copy(update={"merge": told})
    context.describe(MODEL, Kind.MODEL, facts)
    found = {
        "logit_gap": gap,
        "adapter_effect": was.effect,
        "same_top_token": probe.agreement(was.logits, saved),
    }
    summary = f"{facts.parameters:,} parameters in {facts.dtype}, logits within {gap:.2g} of the adapter's"
    return Outcome(figures={**found, **figures}, summary=summary)


def _brief(value: float) -> float:
    """Facts are part of what an artifact is, and rounding differs from machine to machine."""
    return float(f"{value:.2g}")
