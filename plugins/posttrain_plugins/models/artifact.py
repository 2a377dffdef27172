"""The model artifact: a Hugging Face directory whose facts can be read without torch.

A model holds `config.json`, `model.safetensors` (or shards with their index) and the tokenizer's files. An
adapter holds `adapter_config.json`, `adapter_model.safetensors`, its base's `config.json` and a tokenizer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import PolicyFacts
from posttrain.errors import DataError
from posttrain_plugins.models.dialogue import declared_eos, opens, overruled
from posttrain_plugins.models.valued_record import VALUES, scores_of
from posttrain_plugins.models.weights import missing, shape_of
from posttrain_plugins.templates.calling import shows_calls
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json
from posttrain_plugins.templates.vision.files import PROCESSOR_FILES

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GENERATION = "generation_config.json"
QUANTIZATION = "quantization.json"
"""Beside an adapter: how its base was held while it was trained."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
MODEL_FILES = (
    CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
    ADAPTER_CONFIG,
    QUANTIZATION,
    GENERATION,
    VALUES,
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
)
"""Patterns of what makes a directory one model: files of two would make neither."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_ADAPTER = (
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "modules_to_save",
)
_VERSIONS = ("transformers_version", "peft_version")
_HEADER_LIMIT = 100 * 1024 * 1024


def facts_of(directory: Path, templated: Encoder | None = None) -> PolicyFacts:
    """Read the facts of a model or adapter directory from its JSON files, tokenizer and weight headers.

    `parameters` counts what the directory's own weight files hold, so for an adapter the adapter's weights.

    Args:
        directory: The files.
        templated: What encodes for the model once it has got another chat template; its own when left out.

    Raises:
        DataError: A file is missing or malformed.
    """
    config = read_json(directory / CONFIG)
    inner = {**config, **config.get("text_config", {})}
    adapter = read_json(directory / ADAPTER_CONFIG)
    encoder = templated or Encoder.open(directory)
    weights = dict(_weights(directory))
    rows = next((shape[0] for name, (_, shape) in weights.items() if name.endswith(_EMBEDDINGS)), None)
    return PolicyFacts(
        architecture=config.get("model_type"),
        shape=shape_of(inner) or None,
        dtype=_dominant_dtype(weights),
        parameters=sum(math.prod(shape) for _, shape in weights.values()),
        layers=_first(inner, _LAYERS),
        width=_first(inner, _WIDTH),
        vocabulary=encoder.vocabulary,
        reachable=encoder.files.reachable,
        embeddings=rows if rows is not None else inner.get("vocab_size"),
        context=_first(inner, _CONTEXT),
        tokenizer=encoder.files.hash,
        template=encoder.fingerprint(),
        has_template=encoder.has_template,
        overruled=overruled(directory) if templated is None else (),
        opens=opens(encoder),
        calls=None if encoder.template is None else shows_calls(encoder.template.source),
        bos_twice=encoder.bos_twice,
        bos=encoder.bos_id,
        eos=encoder.stop_ids,
        end_of_turn=encoder.end_of_turn,
        declared_eos=declared_eos(encoder),
        pad=encoder.declared_pad,
        unk=encoder.unk_id,
        head=next(iter(config.get("architectures") or ()), None),
        missing=None if adapter else missing(config, weights, _first(inner, _LAYERS)),
        base=adapter.get("base_model_name_or_path"),
        adapter={key: adapter[key] for key in _ADAPTER if key in adapter} or None,
        generation=without_incidentals(encoder.generation) or None,
        quantization=read_json(directory / QUANTIZATION) or None if adapter else None,
        sees="vision_config" in config,
        scores=scores_of(directory),
    )


def context_of(directory: Path) -> int | None:
    """Return the longest sequence in tokens that a directory's config names, or None; needs no weights."""
    config = read_json(directory / CONFIG)
    return _first({**config, **config.get("text_config", {})}, _CONTEXT)


def without_incidentals(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what says nothing about the model: library versions and private fields such as a path."""
    return {key: value for key, value in config.items() if key not in _VERSIONS and not key.startswith("_")}


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config file whose bytes depend on what it says alone."""
    text = json.dumps(without_incidentals(config), indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model or adapter directory.

    Raises:
        DataError: There are none, or an index names a shard that is missing.
    """
    index = read_json(directory / f"{WEIGHTS}.index.json")
    if index:
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise DataError(
                "shards named in the index are missing", where=str(directory), found=", ".join(missing)
            )
        return [directory / name for name in names]
    found = [directory / name for name in (WEIGHTS, ADAPTER_WEIGHTS) if (directory / name).is_file()]
    if found:
        return found
    others = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in directory.glob(suffix))
    raise DataError(
        f"the directory holds no `{WEIGHTS}`",
        where=str(directory),
        found=", ".join(others) or "no weight file",
        expected="weights in safetensors files; pickled ones can run code when they are opened",
        fix="convert them once with `save_pretrained(..., safe_serialization=True)` where you trust them",
    )


def weights_dtype(directory: Path) -> str | None:
    """Return the precision that most of the weights have."""
    return _dominant_dtype(dict(_weights(directory)))


def _weights(directory: Path) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    for path in weight_files(directory):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                yield name, (entry["dtype"], entry["shape"])


def _header(path: Path) -> dict[str, Any]:
    """Read a safetensors header: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _HEADER_LIMIT:
            raise DataError("not a safetensors file, or a truncated one", where=str(path))
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise DataError(f"the safetensors header is damaged: {error}", where=str(path)) from error
    end = max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    if path.stat().st_size != 8 + length + end:
        raise DataError(
            "the safetensors file is truncated or has trailing bytes",
            where=str(path),
            found=f"{path.stat().st_size} bytes",
            expected=f"{8 + length + end} bytes",
        )
    return dict(header)


def _dominant_dtype(weights: Mapping[str, tuple[str, list[int]]]) -> str | None:
    sizes: dict[str, int] = {}
    for dtype, shape in weights.values():
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
    if not sizes:
        return None
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return _DTYPES.get(largest, largest.lower())


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
