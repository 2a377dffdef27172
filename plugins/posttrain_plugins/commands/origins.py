"""What `--model` and `--dataset` of a training command mean: a stage that brings it in."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.artifacts.manifest import CONTENT
from posttrain.artifacts.store import Store
from posttrain.errors import DataError, SpecError
from posttrain.execution.naming import NAMES
from posttrain_plugins.inspection.finding import found
from posttrain_plugins.models.recognition import base_digest, base_stage, is_adapter

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODELS = POLICY | {Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}
DATASETS = frozenset({Kind.DATASET})
LOADERS: Mapping[Collection[Kind], str] = {MODELS: "model.load", DATASETS: "data.load"}


@dataclass(frozen=True)
class Brought:
    """What a name stands for.

    Args:
        stage: The stage that brings it in, as a pipeline file would hold it.
        taken: What of the store was taken, and from which run, where the name left that open.
        base: The stage that brings in what an adapter belongs to, where that is not in the store.
    """

    stage: dict[str, Any]
    taken: str | None = None
    base: dict[str, Any] | None = None


def brought(
    text: str, kinds: frozenset[Kind], workspace: Path, options: Mapping[str, Any], download: bool
) -> Brought:
    """Return the stage that brings in what was named.

    Args:
        text: A path, a hub id, or a name of the store.
        kinds: `MODELS` or `DATASETS`.
        workspace: The `.posttrain` directory.
        options: Options of the stage.
        download: Whether it may use the network.

    Raises:
        DataError: Nothing is called so.
        SpecError: Options are given for what is in the store.
    """
    path, loader = Path(text), LOADERS[kinds]
    if path.exists() and not (path / CONTENT).is_file():
        option = "gguf" if path.suffix == ".gguf" else "path"
        stage = {"uses": loader, "with": {option: text, **options}}
        return (
            _on_base(stage, path, workspace, download)
            if kinds is MODELS and is_adapter(path)
            else Brought(stage)
        )
    if path.exists():
        return Brought(_stored(text, path, options))
    if text.startswith((".", "/", "~")) or path.suffix in (".jsonl", ".json", ".csv", ".parquet", ".gguf"):
        raise DataError("there is no such file or directory", found=text, fix="check the path")
    if _HUB.fullmatch(text) or download:
        network = {"download": True} if download else {}
        return Brought({"uses": loader, "with": {"id": text, **network, **options}})
    try:
        meant = found(text, workspace, kinds)
    except SpecError as error:
        what = "model" if kinds is MODELS else "dataset"
        raise DataError(
            f"there is no {what} of that name",
            where=text,
            found=error.found,
            expected=f"a path, a hub id as OWNER/NAME, {NAMES}",
            fix=error.fix,
        ) from error
    origin = "" if meant.origin is None else f" of {meant.origin}"
    taken = f"{text} is {meant.artifact.ref}{origin}"
    return Brought(_stored(text, meant.artifact.path, options), taken)


def _on_base(stage: dict[str, Any], adapter: Path, workspace: Path, download: bool) -> Brought:
    """Return an adapter's stage, connected to one that loads its base where this is not in the store."""
    known = base_digest(adapter)
    loads = base_stage(adapter)
    if loads is None or (known is not None and Store(workspace).has(known)):
        return Brought(stage)
    base, port = loads
    if download and "id" in base["with"]:
        base["with"]["download"] = True
    return Brought({**stage, "inputs": {"base": f"base.{port}"}}, base=base)


def _stored(text: str, directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    if options:
        given, fix = ", ".join(options), "leave these options out"
        raise SpecError("what is in the store is taken as it is", where=text, found=given, fix=fix)
    return {"uses": "store.load", "with": {"path": str(directory.absolute())}}
