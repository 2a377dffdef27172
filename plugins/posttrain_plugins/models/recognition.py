"""What a directory in the Hugging Face layout holds: a policy, a model that gives numbers, or an adapter on a base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import CONTENT
from posttrain.errors import DataError, StoreError
from posttrain_plugins.models.artifact import ADAPTER_CONFIG, CONFIG, WEIGHTS, weight_files
from posttrain_plugins.stored import read_artifact
from posttrain_plugins.templates.tokenizer import read_json

Loaded = Literal[Kind.MODEL, Kind.ADAPTER, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL]
"""What `model.load` can put out."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TWO = 2
"""Outputs of a head in transformers where a config does not say."""


@dataclass(frozen=True)
class _Head:
    """A head for numbers: how architectures with it end, what peft calls its task, and how many outputs it has."""

    ending: str
    task: str
    outputs: int


_HEADS: Mapping[Kind, _Head] = {
    Kind.REWARD_MODEL: _Head("ForSequenceClassification", "SEQ_CLS", 1),
    Kind.PROCESS_REWARD_MODEL: _Head("ForTokenClassification", "TOKEN_CLS", _TWO),
}


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, and no whole model beside it."""
    whole = any((directory / name).is_file() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))
    return (directory / ADAPTER_CONFIG).is_file() and not whole


def kind_of(directory: Path) -> Kind:
    """Return what a directory holds, as its configs say."""
    if is_adapter(directory):
        task = read_json(directory / ADAPTER_CONFIG).get("task_type")
        return next((kind for kind, head in _HEADS.items() if head.task == task), Kind.ADAPTER)
    architecture = _architecture(read_json(directory / CONFIG))
    return next((kind for kind, head in _HEADS.items() if architecture.endswith(head.ending)), Kind.MODEL)


def require_loadable(directory: Path) -> None:
    """Refuse what cannot be opened without running code of its own.

    Raises:
        DataError: No config, code of its own, or weights that are not safetensors.
    """
    if not directory.is_dir():
        raise DataError("a model is a directory", where=str(directory), fix="for a GGUF file use `gguf`")
    config = read_json(directory / CONFIG)
    if not config and not is_adapter(directory):
        raise DataError(
            "the directory holds no model",
            where=str(directory),
            found=f"no `{CONFIG}`",
            fix="give a complete model's directory",
        )
    if config.get("auto_map"):
        raise DataError(
            "the model needs Python code from its own repository, which posttrain never runs",
            where=str(directory / CONFIG),
            found=f"`auto_map` for {', '.join(sorted(config['auto_map']))}",
            fix="use a model whose architecture is part of transformers",
        )
    weight_files(directory)


def require_kind(directory: Path, wanted: Kind) -> None:
    """Refuse a directory that holds something else, or a classifier of several classes.

    Raises:
        DataError: It does.
    """
    found = kind_of(directory)
    config = read_json(directory / CONFIG)
    if found is not wanted:
        raise DataError(
            "the directory holds another kind of model than is to come out",
            where=str(directory),
            found=f"{_article(found)} ({_architecture(config) or 'an adapter'})",
            expected=_article(wanted),
            fix=f"set `kind: {found}`, or name another model",
        )
    head = _HEADS.get(found)
    if head is None or is_adapter(directory):
        return
    outputs = len(config.get("id2label") or ()) or config.get("num_labels", _TWO)
    if outputs != head.outputs:
        raise DataError(
            f"a {found} has a head with {head.outputs} output{'s' * (head.outputs > 1)}",
            where=str(directory / CONFIG),
            found=f"{outputs} ({_architecture(config)})",
            fix="a classifier of several classes gives no rewards: name a reward model, or train one from a policy "
            "with `train.reward`",
        )


def base_digest(directory: Path) -> str | None:
    """Return the digest of an adapter's base where that is recorded; None where it is not, or lies elsewhere."""
    recorded = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(recorded, str):
        return None
    if _DIGEST.fullmatch(recorded):
        return recorded
    if not (Path(recorded) / CONTENT).is_file():
        return None
    try:
        return read_artifact(Path(recorded)).digest
    except StoreError:
        return None  # a damaged one is as good as none: `unknown_base` names the path


def base_stage(directory: Path) -> tuple[dict[str, Any], str] | None:
    """Return the stage that brings an adapter's recorded base in, and its port; None where nothing usable is said."""
    recorded = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(recorded, str) or not recorded:
        return None
    path = Path(recorded)
    if (path / CONTENT).is_file():
        return {"uses": "store.load", "with": {"path": recorded}}, "artifact"
    if path.exists():
        return {"uses": "model.load", "with": {"path": recorded}}, "model"
    return ({"uses": "model.load", "with": {"id": recorded}}, "model") if _HUB.fullmatch(recorded) else None


def unknown_base(directory: Path) -> DataError:
    """Return the error about an adapter whose base is in no store, with how to load it."""
    recorded = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    stage, port = base_stage(directory) or ({"uses": "model.load", "with": {"path": "DIRECTORY"}}, "model")
    (option, value) = next(iter(stage["with"].items()))
    return DataError(
        "the model that the adapter belongs to is not in the store",
        where=str(directory / ADAPTER_CONFIG),
        found=f"base_model_name_or_path: {recorded}",
        fix="load it in a stage of its own and connect that: "
        f"`base: {{uses: {stage['uses']}, with: {{{option}: {value}}}}}`, and `inputs: {{base: base.{port}}}` here",
    )


def _architecture(config: Mapping[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or ()), ""))


def _article(kind: Kind) -> str:
    return f"{'an' if kind is Kind.ADAPTER else 'a'} `{kind}`"
