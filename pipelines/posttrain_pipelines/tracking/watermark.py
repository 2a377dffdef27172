"""How far a run was projected: a note beside its journal. Only a cache; the tracking store counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.files import write_durably
from posttrain.execution.journal import JOURNAL

FILE = "mlflow.json"

States = dict[str, list[int]]
"""Size in bytes and time of the last change in nanoseconds, by file."""


def sources(workspace: Path, run: str) -> States:
    """Return the state of what a projection of `run` reads, without reading it."""
    directory = workspace / "runs" / run
    attempts = [attempt for node in _entries(directory / "stages") for attempt in _entries(node)]
    return _states([directory / JOURNAL, *(attempt / "events.jsonl" for attempt in attempts)], directory)


def registry(workspace: Path) -> States:
    """Return the state of the registry's files."""
    return _states(_entries(workspace / "aliases"), workspace)


def newest(workspace: Path) -> str | None:
    """Return the newest run: it answers for the registry of the workspace."""
    runs = sorted(_entries(workspace / "runs"), reverse=True)
    return next((run.name for run in runs if (run / JOURNAL).exists()), None)


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


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _states(files: Iterable[Path], base: Path) -> States:
    found: States = {}
    for file in files:
        try:
            state = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        found[str(file.relative_to(base))] = [state.st_size, state.st_mtime_ns]
    return found
