"""What `--model` and `--dataset` of a training command mean: a stage that brings it in."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.artifacts.manifest import CONTENT
from posttrain.errors import DataError, StoreError
from posttrain_plugins.inspection.finding import NAMES, find

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODELS = POLICY | {Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}
DATASETS = frozenset({Kind.DATASET})
LOADERS: Mapping[Collection[Kind], str] = {MODELS: "model.load", DATASETS: "data.load"}


def stage(
    text: str, kinds: frozenset[Kind], workspace: Path, options: Mapping[str, Any], download: bool
) -> dict[str, Any]:
    """Return the stage that brings in what was named.

    Args:
        text: A path, a hub id, or a name of the store.
        kinds: `MODELS` or `DATASETS`.
        workspace: The `.posttrain` directory.
        options: Options of the stage.
        download: Whether it may use the network.

    Raises:
        DataError: Nothing is called so.
        StoreError: Options are given for what is in the store.
    """
    path, loader = Path(text), LOADERS[kinds]
    if path.exists() and not (path / CONTENT).is_file():
        option = "gguf" if path.suffix == ".gguf" else "path"
        return {"uses": loader, "with": {option: text, **options}}
    if path.exists():
        return _stored(text, path, options)
    if text.startswith((".", "/", "~")) or path.suffix in (".jsonl", ".json", ".csv", ".parquet", ".gguf"):
        raise DataError("there is no such file or directory", found=text, fix="check the path")
    if _HUB.fullmatch(text) or download:
        network = {"download": True} if download else {}
        return {"uses": loader, "with": {"id": text, **network, **options}}
    try:
        return _stored(text, Path(os.path.relpath(find(text, workspace, kinds).path)), options)
    except StoreError as error:
        what = "model" if kinds is MODELS else "dataset"
        raise DataError(
            f"there is no {what} of that name",
            where=text,
            found=error.found,
            expected=f"a path, a hub id as OWNER/NAME, {NAMES}",
            fix=error.fix,
        ) from error


def _stored(text: str, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    if options:
        given, fix = ", ".join(options), "leave these options out"
        raise StoreError("what is in the store is taken as it is", where=text, found=given, fix=fix)
    return {"uses": "store.load", "with": {"path": str(directory)}}
