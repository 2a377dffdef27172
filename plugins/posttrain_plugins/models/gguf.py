"""Turning a GGUF file into a plain model directory, so that all that follows sees ordinary weights."""

from __future__ import annotations

from pathlib import Path

from posttrain.artifacts.kinds import PolicyFacts
from posttrain.errors import DataError
from posttrain_plugins.models.artifact import GENERATION, write_config
from posttrain_plugins.templates.tokenizer import read_json

_MAGIC = b"GGUF"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def convert(file: Path, directory: Path, scratch: Path, dtype: str) -> PolicyFacts:
    """Write the model in a GGUF file as a model directory with dequantized safetensors weights.

    Args:
        file: The GGUF file; its tokenizer and chat template come along.
        directory: An existing directory to fill.
        scratch: The tokenizer's files, as `write_tokenizer` leaves them.
        dtype: Precision of the weights written.

    Raises:
        DataError: It is not a GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from posttrain_plugins.models.policy import save_policy, without_progress_bars

    require_gguf(file)
    without_progress_bars()
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    # A model made from the plain config carries no trace of the quantizer that read the file.
    plain = AutoModelForCausalLM.from_config(type(loaded.config)(**config), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    del loaded
    ids = {f"{name}_id": config.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    write_config(scratch / GENERATION, {name: value for name, value in ids.items() if value is not None})
    return save_policy(directory, plain.to(getattr(torch, dtype)), scratch)


def require_gguf(file: Path) -> None:
    """Refuse other files.

    Raises:
        DataError: It is not a GGUF file.
    """
    with file.open("rb") as opened:
        magic = opened.read(len(_MAGIC))
    if magic != _MAGIC:
        raise DataError("not a GGUF file", where=str(file), found=repr(magic), expected=repr(_MAGIC))


def write_tokenizer(file: Path, directory: Path) -> None:
    """Write the tokenizer and the chat template that a GGUF file holds into an existing directory."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.save_pretrained(directory)
    written = read_json(directory / _TOKENIZER_CONFIG)
    kept = {name: written[name] for name in _SPECIAL if written.get(name) is not None}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_config(directory / _TOKENIZER_CONFIG, {**kept, **options})
