"""What `model.merge` does: one model in memory at a time, merged in float32, saved, opened again and compared."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.kinds import MergeFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models import probe
from posttrain_plugins.models.adapted import AdaptedPolicy, Logits, adapted
from posttrain_plugins.models.adapters import merged, open_adapter, tolerated
from posttrain_plugins.models.artifact import CONFIG
from posttrain_plugins.models.merge import ADAPTER, MODEL, MergeConfig
from posttrain_plugins.models.policy import usable_device
from posttrain_plugins.models.quantized import dequantized, is_quantized
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json
from posttrain_plugins.training.peft_options import Quantization

MERGED = 1e-4
"""Largest difference of a logit between merged and unmerged in float32, as a share of the largest logit: rounding of
sums in another order."""
ROUNDED = {"float32": MERGED, "bfloat16": 0.1, "float16": 0.02}
"""The same between what is saved and what was merged, by precision."""


@dataclass(frozen=True)
class _Said:
    """Logits of a probe by an adapter on its base, and the largest difference of a logit to the base alone.

    The latter is None where the base alone says nothing.
    """

    logits: Logits
    effect: float | None


def run(context: StageContext) -> Outcome:
    """Merge, save, open again and compare.

    Raises:
        StageError: The base is quantized and is not to be dequantized, or merging changed what is computed.
        StoreError: The adapter does not say what its base is.
    """
    config: MergeConfig = context.config
    adapter = context.input(ADAPTER)
    base, rounding = _base(context, adapter), _quantization(adapter)
    if config.into == "dequantized" and rounding is None:
        _require_quantized(base, adapter)
    sequences = probe.probe_of(Encoder.open(adapter.path), adapter.facts.context)
    way = adapted(adapter, base)
    trained = None if rounding is None else _said(way, _on_its_base(way, rounding), sequences)
    model = _mergeable(way, rounding, config.into)
    said = _said(way, model, sequences)
    model = merged(model)
    now = way.said(model, sequences)
    exact = _require_same(
        said.logits, now, MERGED, "merging changed what is computed", "keep the adapter on its base"
    )
    way.save(context.output(MODEL), model.to("cpu", _precision(config)))
    del model
    gc.collect()
    opened = way.opened(context.output(MODEL))
    saved = way.said(opened, sequences)
    what = f"the weights as saved in {config.dtype} compute something else than the merged ones"
    rounded = _require_same(now, saved, ROUNDED[config.dtype], what, "choose a wider `dtype`")
    facts = way.kept(context.output(MODEL), opened, trained is None or config.into == "dequantized")
    was = trained or said
    told = _told(was, saved)
    context.describe(MODEL, config.kind, facts.model_copy(update={"merge": told}))
    gap = probe.gap(was.logits, saved)
    if trained is not None:
        context.note(_drift(gap, was.effect))
    effect = {} if was.effect is None else {"adapter_effect": was.effect}
    found = {"logit_gap": gap, **effect, **way.agreement(was.logits, saved)}
    summary = f"{facts.parameters:,} parameters in {facts.dtype}, logits within {gap:.2g} of the adapter's"
    return Outcome(figures={**found, "merge_gap": exact, "rounding_gap": rounded}, summary=summary)


def _base(context: StageContext, adapter: Artifact) -> Artifact:
    if adapter.facts.base is None:
        raise StoreError("the adapter does not say which model it belongs to", where=adapter.ref)
    return context.artifact(adapter.facts.base)


def _quantization(adapter: Artifact) -> Quantization | None:
    recorded = adapter.facts.quantization
    return None if recorded is None else Quantization(**recorded)


def _require_quantized(base: Artifact, adapter: Artifact) -> None:
    if "quantization_config" not in read_json(base.path / CONFIG):
        raise StageError(
            "there is nothing to dequantize",
            where=adapter.ref,
            found="an adapter that was trained on its base as it is",
            fix="leave `into` out",
        )


def _on_its_base(way: AdaptedPolicy, quantization: Quantization) -> Any:
    """Open the adapter on its base as it was trained."""
    return open_adapter(way.bare(quantization), way.adapter.path, trainable=False).to(usable_device())


def _mergeable(way: AdaptedPolicy, rounding: Quantization | None, into: str) -> Any:
    """Open the adapter on whole weights in float32: those of the store, or rounded ones that are made whole again."""
    model = way.bare(rounding if into == "dequantized" else None)
    if is_quantized(model) and into == "base":
        raise StageError(
            "an adapter is not merged into quantized weights: they would be rounded once more",
            where=way.base.ref,
            found="a base with `quantization_config` in its config",
            fix="set `into: dequantized`",
        )
    whole = dequantized(model) if is_quantized(model) else model
    return open_adapter(whole, way.adapter.path, trainable=False).to(usable_device())


def _said(way: AdaptedPolicy, model: Any, sequences: list[list[int]]) -> _Said:
    logits = way.said(model, sequences)
    if not way.comparable:
        return _Said(logits, None)
    with tolerated(), model.disable_adapter():
        return _Said(logits, probe.gap(logits, way.said(model, sequences)))


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


def _precision(config: MergeConfig) -> Any:
    import torch

    return getattr(torch, config.dtype)


def _drift(gap: float, effect: float | None) -> str:
    """Say how far a merged model is from what was trained on a base in few bits."""
    changed = "" if effect is None else f", and the adapter had changed them by up to {effect:.3g}"
    return (
        f"the adapter was trained on a base in few bits: the merged model's logits differ from that policy's by up to "
        f"{gap:.3g}{changed}"
    )


def _told(was: _Said, saved: Logits) -> MergeFacts:
    """Tell how far what was saved is from what was trained."""
    gap = probe.gap(was.logits, saved)
    beyond = gap > MERGED * max(1.0, probe.size(was.logits))
    return MergeFacts(
        gap=_brief(gap) if beyond else 0.0, effect=None if was.effect is None else _brief(was.effect)
    )


def _brief(value: float) -> float:
    """Facts are part of what an artifact is, and rounding differs from machine to machine."""
    return float(f"{value:.2g}")
