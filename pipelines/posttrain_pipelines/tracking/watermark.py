"""How far a run was projected: a note beside its journal. Only a cache; the tracking store counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.files import write_durably

FILE = "mlflow.json"


def sources(workspace: Path, run: str) -> dict[str, Any]:
    """Return the state of all that a projection reads: sizes of append-only files, hashes of others."""
    directory = workspace / "runs" / run
    logs = [directory / "journal.jsonl", *sorted(directory.glob("stages/*/*/events.jsonl"))]
    registry = sorted((workspace / "aliases").glob("*.json"))
    return {
        **{str(log.relative_to(directory)): log.stat().st_size for log in logs if log.exists()},
        **{f"aliases/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in registry},
    }


def read(workspace: Path, run: str) -> Mapping[str, Any]:
    """Return the note; empty when there is none or it cannot be read."""
    try:
        found = json.loads((workspace / "runs" / run / FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(workspace: Path, run: str, note: Mapping[str, Any]) -> None:
    """Replace the note."""
    write_durably(workspace / "runs" / run / FILE, json.dumps(note, sort_keys=True).encode())
