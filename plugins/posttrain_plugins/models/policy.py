"""Opening a policy from its artifact and saving one; the bytes depend on weights and options alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError, StoreError
from posttrain_plugins.models.artifact import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    TOKENIZER_FILES,
    facts_of,
    write_config,
)
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json

if TYPE_CHECKING:
    from peft import PeftModel


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
) -> Policy:
    """Open a model, or an adapter on its base, in evaluation mode.

    Args:
        artifact: A model or an adapter.
        context: Looks up the base of an adapter.
        dtype: Precision to compute in, such as `float32` or `bfloat16`.
        trainable: Let gradients reach the weights; of an adapter, only the adapter's.
        attention: The attention implementation; None leaves the choice to transformers.
        device: Where to put it; `usable_device()` for a stage that computes with it.

    Raises:
        StoreError: The adapter does not say what its base is, or the base is not in the store.
    """
    if artifact.kind is not Kind.ADAPTER:
        model = load_model(artifact.path, dtype, attention).to(device)
        model.requires_grad_(trainable)
        return Policy(model, Encoder.open(artifact.path), artifact)
    if artifact.facts.base is None:
        raise StoreError("the adapter does not say which model it belongs to", where=artifact.ref)
    base = context.artifact(artifact.facts.base)
    model = _with_adapter(load_model(base.path, dtype, attention), artifact.path, trainable).to(device)
    return Policy(model, Encoder.open(artifact.path), artifact, base)


def usable_device() -> str:
    """Return the device that this process may compute on: workers that were given no GPU see none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(directory: Path, dtype: str, attention: str | None = None) -> Any:
    """Open the weights of a model directory on the CPU, in evaluation mode.

    Raises:
        StageError: Weights that the architecture needs are missing, or have another shape.
    """
    import torch
    from transformers import AutoModelForCausalLM

    without_progress_bars()
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    problems = [f"{name}: {sorted(map(str, report[name]))[:5]}" for name in _UNFIT if report.get(name)]
    if problems:
        raise StageError(
            "the weight files do not fit the architecture in `config.json`",
            where=str(directory),
            found="; ".join(problems),
            fix="transformers would have made up the missing weights; get a complete checkpoint",
        )
    return model.eval()


def save_policy(directory: Path, model: Any, source_dir: Path, base: str | None = None) -> PolicyFacts:
    """Write a policy's files and return its facts.

    Args:
        directory: An existing directory to fill.
        model: A transformers model, or a peft model, of which the adapter alone is written.
        source_dir: A model directory whose tokenizer, chat template and generation config are copied.
        base: Digest of the model that an adapter belongs to; required for a peft model.
    """
    if hasattr(model, "peft_config"):
        _save_adapter(directory, model, source_dir, base)
    else:
        without_progress_bars()
        model.save_pretrained(directory)
        write_config(directory / CONFIG, read_json(directory / CONFIG))
    copy_companions(source_dir, directory)
    return facts_of(directory)


def without_progress_bars() -> None:
    """Keep transformers' progress bars out of the stage's log."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def copy_companions(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template and generation config; what the source lacks is removed."""
    for name in TOKENIZER_FILES:
        (directory / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    (directory / GENERATION).unlink(missing_ok=True)
    if (source / GENERATION).is_file():
        write_config(directory / GENERATION, read_json(source / GENERATION))


_UNFIT = ("missing_keys", "mismatched_keys")


def _with_adapter(model: Any, directory: Path, trainable: bool) -> PeftModel:
    from peft import PeftModel

    model.requires_grad_(False)
    return PeftModel.from_pretrained(model, directory, is_trainable=trainable, torch_device="cpu").eval()


def _save_adapter(directory: Path, model: PeftModel, source_dir: Path, base: str | None) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    if base is None:
        raise StageError("an adapter can only be saved with the digest of its base")
    # Left to itself, peft looks on the hub whether the embeddings changed; they belong to the base.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    options = model.peft_config[model.active_adapter].to_dict()
    options |= {"base_model_name_or_path": base, "inference_mode": True, "revision": None}
    write_config(directory / ADAPTER_CONFIG, _plain(options))
    write_config(directory / CONFIG, read_json(source_dir / CONFIG))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Turn sets, whose order changes from process to process, into sorted lists."""
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
    return dict(json.loads(json.dumps(ordered, default=str)))
