"""The stage `store.load`: an artifact of a store, as it is, at the beginning of a pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError

from posttrain.artifacts.digest import hash_file
from posttrain.artifacts.files import guarded
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import CONTENT, Artifact, Manifest
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Source,
    Stage,
    StageConfig,
    StageContext,
)
from posttrain.errors import StoreError

_ARTIFACT = "artifact"


class LoadConfig(StageConfig):
    """Where the artifact is."""

    path: Source = Field(
        description="its directory, `WORKSPACE/store/objects/DIGEST`, which holds `content.json`"
    )


class Load(Stage):
    """Put an artifact out again. It is the same artifact: equal content has one digest, whoever made it.

    An adapter's base has to be in the store of the run.
    """

    config = LoadConfig
    target = "posttrain_plugins.stored:run"

    def outputs(self, config: LoadConfig) -> tuple[Port, ...]:
        """One port, of the kind that the artifact is; of all kinds where it cannot be read."""
        known = _readable(config)
        return (Port(_ARTIFACT, frozenset(Kind) if known is None else frozenset({known.kind})),)

    def predict(self, config: LoadConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The facts are known."""
        known = _readable(config)
        if known is None:
            return {_ARTIFACT: Prediction(Kind.REPORT)}
        return {_ARTIFACT: Prediction(known.kind, known.facts)}

    def check(self, config: LoadConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report what is no artifact."""
        try:
            read_artifact(Path(config.path))
        except StoreError as error:
            yield Finding("store", Level.ERROR, Certainty.VERIFIED, str(error))

    def prompts(self, config: LoadConfig, port: str, base: Path) -> frozenset[str] | None:
        """Those of a dataset are beside its rows."""
        from posttrain_plugins.data.rows import PROMPTS

        file = base / config.path / PROMPTS
        return frozenset(file.read_text(encoding="utf-8").split()) if file.is_file() else None


def run(context: StageContext) -> Outcome:
    """Copy the files.

    Raises:
        StoreError: The directory is no artifact, or a file is not the one that its manifest names.
    """
    artifact = read_artifact(context.base / context.config.path)
    directory = context.output(_ARTIFACT)
    for entry in artifact.manifest.files:
        target = directory / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with guarded(artifact.file(entry.path), "copy the artifact"):
            shutil.copyfile(artifact.file(entry.path), target)
        found = hash_file(target)
        if found != entry.sha256:
            raise StoreError(
                "the artifact has a file with other content",
                where=str(artifact.file(entry.path)),
                found=f"sha256 {found}",
                expected=f"sha256 {entry.sha256}",
                fix="make the artifact again; `posttrain store verify` tells what else is damaged",
            )
    context.describe(_ARTIFACT, artifact.kind, artifact.facts)
    return Outcome(summary=artifact.ref)


def _readable(config: LoadConfig) -> Artifact | None:
    try:
        return read_artifact(Path(config.path))
    except StoreError:
        return None  # `check` tells why


def read_artifact(directory: Path) -> Artifact:
    """Return the artifact that a directory of a store is.

    Raises:
        StoreError: It is none.
    """
    file = directory / CONTENT
    try:
        return _parsed(directory, file.stat().st_mtime_ns)
    except (OSError, json.JSONDecodeError, ValidationError) as error:
        raise StoreError(
            "the directory is no artifact",
            where=str(directory),
            found=f"{CONTENT}: {type(error).__name__}",
            expected="a directory under `store/objects` of a workspace",
        ) from error


@lru_cache(maxsize=32)
def _parsed(directory: Path, stamp: int) -> Artifact:
    manifest = Manifest.model_validate_json((directory / CONTENT).read_bytes())
    return Artifact(manifest.digest, manifest, directory)
