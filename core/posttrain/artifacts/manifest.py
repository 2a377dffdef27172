"""What an artifact says of itself: `content.json` and `provenance.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from posttrain.artifacts.kinds import Facts, Kind

CONTENT = "content.json"
PROVENANCE = "provenance.json"


def canonical(value: Any) -> bytes:
    """Return the one JSON spelling of `value` that is hashed: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(value: Any) -> str:
    """Return the sha256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


class FileEntry(BaseModel):
    """One payload file of an artifact; `path` is relative and uses forward slashes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        """Refuse a path that leads out of the artifact: files are copied to where they say they belong."""
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError("a file's path must lead into its artifact")
        return path


class Manifest(BaseModel):
    """`content.json`: what an artifact is. Its digest addresses the artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    kind: Kind
    facts: Facts
    files: tuple[FileEntry, ...]

    @property
    def digest(self) -> str:
        """The sha256 of the canonical manifest."""
        return digest_of(self.model_dump(mode="json"))

    @property
    def size(self) -> int:
        """Bytes of payload."""
        return sum(entry.size for entry in self.files)


class Provenance(BaseModel):
    """`provenance.json`: who made an artifact first. Not part of its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    stage: str
    node: str
    port: str
    key: str
    run: str
    parents: dict[str, tuple[str, ...]]
    sources: dict[str, str] = {}
    seed: int | None = None
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    device: str | None = None
    threads: int | None = None
    created: str


@dataclass(frozen=True)
class Artifact:
    """A committed artifact: its digest, its manifest and the directory that holds it."""

    digest: str
    manifest: Manifest
    path: Path

    @property
    def kind(self) -> Kind:
        """What the artifact is."""
        return self.manifest.kind

    @property
    def facts(self) -> Any:
        """The typed facts of the manifest."""
        return self.manifest.facts

    @property
    def ref(self) -> str:
        """The short name shown to people, such as `model:3f2c9a1b04de`."""
        return f"{self.kind}:{self.digest[:12]}"

    def file(self, name: str) -> Path:
        """Return the path of one payload file."""
        return self.path / name
