"""Opening a policy from its artifact and saving one; the bytes depend on weights and options alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models.adapters import open_adapter, save_adapter
from posttrain_plugins.models.artifact import (
    CONFIG,
    GENERATION,
    TOKENIZER_FILES,
    facts_of,
    write_config,
)
from posttrain_plugins.models.quantized import bits_of, is_quantized, keep_exact, record
from posttrain_plugins.models.wrappers import never_wrapped
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json
from posttrain_plugins.templates.vision.files import PROCESSOR_FILES

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain_plugins.training.peft_options import Quantization


class _Artifacts(Protocol):
    def artifact(self, digest: str) -> Artifact: ...


@dataclass(frozen=True)
class Policy:
    """A policy in memory.

    Args:
        model: The transformers model, or the peft model around it.
        encoder: Its tokenizer and chat template.
        artifact: Where it came from.
        base: The model that an adapter sits on; None for a model.
    """

    model: Any
    encoder: Encoder
    artifact: Artifact
    base: Artifact | None = None


def open_policy(
    artifact: Artifact,
    context: _Artifacts,
    *,
    dtype: str = "float32",
    trainable: bool = False,
    attention: str | None = None,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> Policy:
    """Open a model, or an adapter on its base, in evaluation mode.

    Args:
        artifact: A model or an adapter.
        context: Looks up the base of an adapter.
        dtype: Precision to compute in, such as `float32` or `bfloat16`.
        trainable: Let gradients reach the weights; of an adapter, only the adapter's.
        attention: The attention implementation; None leaves the choice to transformers.
        device: Where to put it; `usable_device()` for a stage that computes with it.
        quantization: Hold the weights that adapters may sit on in few bits; such a model is frozen.

    Raises:
        StoreError: The adapter does not say what its base is, or the base is not in the store.
        StageError: The model has no embeddings for some tokens of its tokenizer.
    """
    encoder = Encoder.open(artifact.path)
    if artifact.kind is not Kind.ADAPTER:
        model = load_model(artifact.path, dtype, attention, quantization).to(device)
        require_embeddings(model, encoder, artifact)
        model.requires_grad_(trainable and not is_quantized(model))
        return Policy(model, encoder, artifact)
    if artifact.facts.base is None:
        raise StoreError("the adapter does not say which model it belongs to", where=artifact.ref)
    base = context.artifact(artifact.facts.base)
    loaded = load_model(base.path, dtype, attention, quantization)
    require_embeddings(loaded, encoder, artifact)
    model = open_adapter(loaded, artifact.path, trainable).to(device)
    return Policy(model, encoder, artifact, base)


def usable_device() -> str:
    """Return the device that this process may compute on: workers that were given no GPU see none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    directory: Path, dtype: str, attention: str | None = None, quantization: Quantization | None = None
) -> Any:
    """Open the weights of a model directory on the CPU, in evaluation mode.

    Raises:
        StageError: Weights that the architecture needs are missing, or have another shape.
    """
    return load_as(_architecture(directory), directory, dtype, attention, quantization)


def load_as(
    architecture: Any,
    directory: Path,
    dtype: str,
    attention: str | None = None,
    quantization: Quantization | None = None,
    *,
    made_up: Sequence[str] = (),
    whole: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Open the weights of a model directory as a model of some architecture, on the CPU, in evaluation mode.

    Args:
        architecture: One of transformers' `Auto…` classes.
        directory: The model directory.
        dtype: Precision to compute in.
        attention: The attention implementation; None leaves the choice to transformers.
        quantization: Hold weights in few bits.
        made_up: Modules whose weights may be missing; transformers makes them up.
        whole: Modules that are never held in few bits; those that transformers spares, where left out.
        options: Options of the config to set.

    Raises:
        StageError: Weights that the architecture needs are missing, or have another shape.
        ValueError: The architecture does not know the model's config.
    """
    import torch

    without_progress_bars()
    if quantization is not None:
        # Told `None`, transformers would forget that a stored model is quantized.
        options["quantization_config"] = bits_of(quantization, dtype, whole)
    model, report = architecture.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    _require_complete(report, directory, made_up)
    if is_quantized(model):
        keep_exact(model)
    return model.eval()


def _require_complete(report: Mapping[str, Any], directory: Path, made_up: Sequence[str]) -> None:
    """Refuse what transformers says it has loaded where weights are missing or have another shape."""
    unfit = {name: {str(key) for key in report.get(name) or ()} for name in _UNFIT}
    unfit[_MISSING] = {key for key in unfit[_MISSING] if key.partition(".")[0] not in made_up}
    problems = [f"{name}: {sorted(keys)[:5]}" for name, keys in unfit.items() if keys]
    if problems:
        raise StageError(
            "the weight files do not fit the architecture in `config.json`",
            where=str(directory),
            found="; ".join(problems),
            fix="transformers would have made up the missing weights; get a complete checkpoint",
        )


def save_policy(
    directory: Path,
    model: Any,
    source_dir: Path,
    base: str | None = None,
    *,
    initial: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    quantization: Quantization | None = None,
) -> PolicyFacts:
    """Write a policy's files and return its facts.

    Args:
        directory: An existing directory to fill.
        model: A transformers model, or a peft model, of which the adapter alone is written.
        source_dir: A model directory whose tokenizer, chat template and generation config are copied.
        base: Digest of the model that an adapter belongs to; required for a peft model.
        initial: First values of an adapter that was taken out of the base weights.
        weights: The model's tensors by name, where it holds only parts of them; of a peft model, the trained ones.
        quantization: How the base was held while an adapter was trained on it.
    """
    write_weights(directory, model, base, initial=initial, weights=weights, quantization=quantization)
    configured = source_dir if hasattr(model, "peft_config") else directory
    write_config(directory / CONFIG, read_json(configured / CONFIG))
    copy_companions(source_dir, directory)
    return facts_of(directory)


def write_weights(
    directory: Path,
    model: Any,
    base: str | None,
    *,
    initial: Mapping[str, Tensor] | None,
    weights: Mapping[str, Tensor] | None,
    quantization: Quantization | None,
) -> None:
    """Write the weights of a model, or of a peft model its adapter alone; as `save_policy` otherwise.

    Raises:
        StageError: An adapter has no base, or a tensor of it would not be saved.
    """
    if not hasattr(model, "peft_config"):
        without_progress_bars()
        with never_wrapped():
            model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
        return
    if base is None:
        raise StageError("an adapter can only be saved with the digest of its base")
    save_adapter(directory, model, base, initial=initial, state=weights)
    record(directory, quantization)


def without_progress_bars() -> None:
    """Keep transformers' progress bars out of the stage's log."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def copy_companions(source: Path, directory: Path) -> None:
    """Copy tokenizer, image processor, chat template and generation config; what the source lacks is removed."""
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        (directory / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    (directory / GENERATION).unlink(missing_ok=True)
    if (source / GENERATION).is_file():
        write_config(directory / GENERATION, read_json(source / GENERATION))


def _architecture(directory: Path) -> Any:
    """Return the class that opens a model: one with a head for text, and an eye where it has one."""
    import transformers

    config = read_json(directory / CONFIG)
    names = config.get("architectures") or ()
    sees = "vision_config" in config and any(name.endswith("ForConditionalGeneration") for name in names)
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


_MISSING = "missing_keys"
_UNFIT = (_MISSING, "mismatched_keys")


def require_embeddings(model: Any, encoder: Encoder, artifact: Artifact) -> None:
    """Refuse a model whose tokenizer and template write ids that it has no embeddings for.

    Raises:
        StageError: It does not embed them all.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if encoder.files.reachable > rows:
        raise StageError(
            "the model has no embeddings for the last tokens of its tokenizer",
            where=artifact.ref,
            found=f"{rows} embeddings",
            expected=f"at least {encoder.files.reachable}",
            fix="resize the embeddings of the model, or of an adapter's base, and save it with the tokenizer",
        )
