"""Models that give numbers: rewards for answers, log-odds for steps. Opened, tried and saved.

They are transformers' own classes for sequences and tokens, so that `AutoModelForSequenceClassification` and
`AutoModelForTokenClassification` open what is saved here. Of models that see there mostly are none: see
`models/seeing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError
from posttrain_plugins.models.artifact import CONFIG, facts_of, write_config
from posttrain_plugins.models.heads import FORMS, Loading, pooling_pad
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.models.policy import Policy, copy_companions, require_embeddings, write_weights
from posttrain_plugins.models.valued_record import Probe, probes_of
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.training.head.value import HEADS, number, value_parts

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain_plugins.training.peft_options import Quantization

AGREES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest difference between a number and the one kept with the model, as a share of it (of 1 where it is smaller), by
the precision it is computed in. A head that was lost is off by about all of it."""


def open_valued(
    artifact: Artifact,
    context: Any,
    kind: Kind,
    outputs: int | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    trainable: bool = False,
    attention: str | None = None,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> Policy:
    """Open a model that gives numbers, or put a fresh head on a policy, in evaluation mode.

    A model of the kind itself is tried on the conversations kept with it. An adapter on a policy is merged into its
    base in float32 before it gets a head.

    Args:
        artifact: A model of this kind, as weights or as an adapter; or a policy.
        context: Looks up the base of an adapter.
        kind: What is wanted, a key of `FORMS`.
        outputs: Outputs of the head; as many as the kind has by default.
        seed: Decides a fresh head's weights.
        dtype: Precision to compute in.
        trainable: Let gradients reach the weights; of an adapter, only the adapter's and the head's.
        attention: The attention implementation; None leaves the choice to transformers.
        device: Where to put it.
        quantization: Hold all but the head and the embeddings in 4 bits; such weights are frozen.

    Raises:
        StoreError: The adapter does not say what its base is, lacks tensors, or its base is not in the store.
        StageError: There is no such head for this architecture, weights are missing, the head has another number of
            outputs, or the model no longer gives the numbers it was saved with.
    """
    form, encoder = FORMS[kind], Encoder.open(artifact.path)
    outputs = form.outputs if outputs is None else outputs
    loading = Loading(form, outputs, seed, dtype, attention, quantization, pooling_pad(encoder))
    model, base = loading.opened(artifact, context, kind, trainable)
    model = model.to(device).eval()
    require_embeddings(model, encoder, artifact)
    if artifact.kind is kind and quantization is None:
        require_same_numbers(model, artifact.path, dtype)
    return Policy(model, encoder, artifact, base)


def base_with_head(
    adapter: Artifact, base: Artifact, dtype: str = "float32", quantization: Quantization | None = None
) -> Any:
    """Open what an adapter with a head sits on, without the adapter; its head is the base's own, or a fresh one.

    Args:
        adapter: A model that gives numbers, as an adapter.
        base: What it belongs to.
        dtype: Precision to compute in.
        quantization: Hold all but the head and the embeddings in few bits.
    """
    form, encoder = FORMS[adapter.kind], Encoder.open(adapter.path)
    loading = Loading(form, form.outputs, 0, dtype, None, quantization, pooling_pad(encoder))
    return loading.model(base, fresh=base.kind is not adapter.kind)


def save_valued(
    directory: Path,
    model: Any,
    source_dir: Path,
    base: str | None = None,
    *,
    initial: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    quantization: Quantization | None = None,
) -> PolicyFacts:
    """Write the files of a model that gives numbers and return its facts.

    Args:
        directory: An existing directory to fill.
        model: A transformers model, or a peft model, of which the adapter and the head alone are written.
        source_dir: A model directory whose tokenizer, chat template and generation config are copied.
        base: Digest of the model that an adapter belongs to; required for a peft model.
        initial: First values of an adapter that was taken out of the base weights.
        weights: The model's tensors by name, where it holds only parts of them; of a peft model, the trained ones.
        quantization: How the base was held while an adapter was trained on it.

    Raises:
        StageError: The head, or a tensor of the adapter, would not be saved.
    """
    plain = model
    if hasattr(model, "peft_config"):
        _require_head_kept(model)
        plain = model.get_base_model()
    write_weights(directory, model, base, initial=initial, weights=weights, quantization=quantization)
    write_config(directory / CONFIG, _config_of(plain))
    copy_companions(source_dir, directory)
    return facts_of(directory)


def numbers(model: Any, probes: Sequence[Probe]) -> list[list[float]]:
    """Return what a model says at the places of each probe, one probe after the other, without padding."""
    decoder, head = value_parts(model)
    device = next(model.parameters()).device
    found = []
    with evaluating(model):
        for probe in probes:
            tokens = torch.tensor([probe.tokens], device=device)
            hidden = decoder(input_ids=tokens, use_cache=False)[0][0]
            found.append(number(head(hidden[list(probe.places)])).float().tolist())
    return found


def require_same_numbers(model: Any, directory: Path, dtype: str = "float32") -> None:
    """Refuse a model that no longer gives the numbers kept with it.

    Raises:
        StageError: It does not: its head or other weights are not those that were saved.
    """
    probes = probes_of(directory)
    for probe, values in zip(probes, numbers(model, probes), strict=True):
        for found, kept in zip(values, probe.values, strict=True):
            # Not `>`: what is not a number does not agree either.
            if not abs(found - kept) <= AGREES[dtype] * max(1.0, abs(kept)):
                raise StageError(
                    "the model does not give the numbers that were kept when it was saved",
                    where=str(directory),
                    found=f"{found:.6g}",
                    expected=f"{kept:.6g}",
                    fix="get the complete model: its head or other weights are not those that were trained",
                )


def _config_of(model: Any) -> dict[str, Any]:
    """Return a model's config as it is saved: its class is named, and 4 bits belong to memory alone."""
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    return {**config, "architectures": [type(model).__name__], "pad_token_id": model.config.pad_token_id}


def _require_head_kept(model: Any) -> None:
    _, head = value_parts(model)
    if not hasattr(head, "modules_to_save"):
        raise StageError(
            "the head would not be saved with the adapter",
            found="an adapter for another task",
            expected=f"the head ({' or '.join(HEADS)}) among the modules that are trained and saved whole",
        )
