"""Adapter files: written complete, opened complete, and merged into a model of its own."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import StageError, StoreError
from posttrain_plugins.models.artifact import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_config

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor


@contextmanager
def tolerated() -> Iterator[None]:
    """Keep warnings of peft about what is taken care of here out of the log."""
    with warnings.catch_warnings():
        for message in _TOLERATED:
            warnings.filterwarnings("ignore", message=message)
        yield


_TOLERATED = (
    # `merged` gives tied layers weights of their own first, and sets the config right.
    ".*tie_word_embeddings=True",
    "Input and output embeddings are no longer tied after merging",
    # peft sets it right, which is what is wanted.
    "fan_in_fan_out is set to",
    # `StartingPolicy` finds out whether it does.
    "Careful, disabling adapter layers with bias",
    # What sees is excluded whether or not something there would get an adapter.
    "You have passed exclude_modules=",
    # An error here: `verified`.
    "Adapter .* LoRA tensor\\(s\\) have invalid shape",
    "Found missing adapter keys",
)


def open_adapter(model: Any, directory: Path, trainable: bool) -> PeftModel:
    """Put a saved adapter on its base, which is frozen, in evaluation mode.

    Raises:
        StoreError: The file lacks tensors that the adapter needs, or has others.
    """
    from peft import PeftModel
    from safetensors import safe_open

    model.requires_grad_(False)
    try:
        with tolerated():
            opened = PeftModel.from_pretrained(
                model, directory, is_trainable=trainable, torch_device="cpu"
            ).eval()
    except KeyError as error:
        # So it ends where a module that is saved whole, such as a head, is not in the file.
        raise StoreError(
            "the adapter's tensors are not those that its config asks for",
            where=str(directory),
            found=f"no {error}",
        ) from error
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
        wrong = sorted(set(file.keys()) ^ _state(opened).keys())
    if wrong:
        raise StoreError(
            "the adapter's tensors are not those that its config asks for",
            where=str(directory),
            found=", ".join(wrong[:5]),
        )
    return opened


def save_adapter(
    directory: Path,
    model: PeftModel,
    base: str,
    *,
    initial: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter's weights and config.

    Args:
        directory: An existing directory.
        model: The peft model.
        base: Digest of the model that the adapter belongs to.
        initial: First values of an adapter that was taken out of the base; it is saved relative to them.
        state: The whole model's tensors, where the ranks hold parts of them.

    Raises:
        StageError: A tensor is missing, empty or flat.
    """
    from safetensors.torch import save_file

    tensors = adapter_state(model, state)
    options = model.peft_config[model.active_adapter].to_dict()
    if initial is not None:
        tensors, options = _relative(tensors, initial, options)
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    options |= {"base_model_name_or_path": base, "inference_mode": True, "revision": None}
    write_config(directory / ADAPTER_CONFIG, _plain(options))


def adapter_state(model: PeftModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the adapter's tensors by their names in a file.

    Args:
        model: The peft model.
        state: The trained tensors by their names in the model, where the ranks hold parts of them; else the model's.

    Raises:
        StageError: A tensor is missing, empty or flat.
    """
    own = _state(model)
    if state is not None:
        # An adapter may hold what is not trained, such as all biases where some parts of the model are frozen.
        frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        state = {**frozen, **state}
    tensors = verified(own if state is None else _state(model, state), own)
    _require_all_trained(model, tensors, dict(model.named_parameters()) if state is None else state)
    return tensors


def verified(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors if they are complete and whole; partitioned ones look empty or flat.

    Raises:
        StageError: They are not.
    """
    problems = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"{name} does not belong there" for name in sorted(tensors.keys() - expected.keys())]
    for name, tensor in tensors.items():
        flat = tensor.dim() != 2 and any(part in name for part in _MATRICES)
        if flat or tensor.numel() == 0:
            problems.append(f"{name} has shape {tuple(tensor.shape)}")
    if problems or not tensors:
        raise StageError(
            "the adapter is not complete, so it is not saved",
            found="; ".join(problems[:5]) or "no tensor at all",
            expected="every tensor whole, the matrices of LoRA with two dimensions",
            fix="gather parameters that ranks hold parts of before saving",
        )
    return dict(tensors)


def merged(model: PeftModel) -> Any:
    """Return the model that an adapter makes of its base, as an ordinary one; the base in memory is used up.

    Where input and output embeddings shared a weight and only one of them was trained, they are two weights
    afterwards and the config says so: what is saved and opened again computes the same.
    """
    import torch

    shared = _says_tied(model.get_base_model().config)
    _untie(model)
    with tolerated():
        plain = model.merge_and_unload(progressbar=False, safe_merge=True)
    source, head = plain.get_input_embeddings(), plain.get_output_embeddings()
    if head is not None:
        tied = shared and torch.equal(source.weight, head.weight)
        for config in _saying_tied(plain.config):
            config.tie_word_embeddings = tied
        if tied:
            head.weight = source.weight
    return plain


_MATRICES = (".lora_A.", ".lora_B.")


def _state(model: PeftModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    given = None if state is None else dict(state)
    try:
        with tolerated():
            # Left to itself, peft looks on the hub whether the embeddings changed; they belong to the base.
            return dict(get_peft_model_state_dict(model, state_dict=given, save_embedding_layers=False))
    except KeyError as error:
        raise StageError("the adapter is not complete, so it is not saved", found=f"no {error}") from error


def _require_all_trained(
    model: PeftModel, tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]
) -> None:
    """Refuse to leave out what was trained: of `source`, the tensors by their names in the model."""
    kept = {tensor.data_ptr() for tensor in tensors.values()}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    lost = [name for name in trained if name not in source or source[name].data_ptr() not in kept]
    if lost:
        raise StageError("trained parameters would not be saved with the adapter", found=", ".join(lost[:5]))


def _relative(
    tensors: Mapping[str, Tensor], initial: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Express an adapter on the base as it was before A₀ and B₀ were taken out of it, at twice the rank.

    W − sB₀A₀ + sBA = W + s[B, −B₀][A; A₀].
    """
    import torch

    joined = {
        name: torch.cat([tensor, initial[name].to(tensor)], 0)
        if ".lora_A." in name
        else torch.cat([tensor, -initial[name].to(tensor)], 1)
        for name, tensor in tensors.items()
        if name in initial and any(part in name for part in _MATRICES)
    }
    scale = math.sqrt(2) if options["use_rslora"] else 2
    changed = {"r": 2 * options["r"], "lora_alpha": scale * options["lora_alpha"], "init_lora_weights": True}
    return {**tensors, **joined}, {**options, **changed}


def _untie(model: PeftModel) -> None:
    """Give the head weights of its own when an adapter sits on one of two layers that share them."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    whole: Any = model.get_base_model()
    layers = whole.get_input_embeddings(), whole.get_output_embeddings()
    if None in layers or not any(isinstance(layer, BaseTunerLayer) for layer in layers):
        return
    plain: list[Any] = [
        layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers
    ]
    source, head = plain
    if source.weight.data_ptr() == head.weight.data_ptr():
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _says_tied(config: Any) -> bool:
    return any(each.tie_word_embeddings for each in _saying_tied(config))


def _saying_tied(config: Any) -> list[Any]:
    """Return the configs that say whether layers share a weight: that of the model, of its text model, or both."""
    configs = {id(each): each for each in (config, config.get_text_config())}
    return [each for each in configs.values() if hasattr(each, "tie_word_embeddings")]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Turn sets, whose order changes from process to process, into sorted lists."""
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in options.items()}
    return dict(json.loads(json.dumps(ordered, default=str)))
