"""What trackers lack of past runs, made up for when there is nothing to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.execution.records import RunRecord, list_runs
from posttrain.registry.isolation import Failure, isolated

NEWEST = 20
"""How many of the newest runs are looked at. `posttrain sync` looks at all."""


def catch_up(trackers: Mapping[str, Callable[[], Any]], workspace: Path) -> list[str]:
    """Bring each tracker up to date with the newest runs where it lacks something.

    Whatever one tracker or one run fails with keeps no other from being tried.

    Args:
        trackers: What makes each tracker.
        workspace: The `.posttrain` directory.

    Returns:
        A note for each failure, and what trackers have to say themselves.
    """
    return [note for name, make in trackers.items() for note in _notes(name, make, workspace)]


def _notes(name: str, make: Callable[[], Any], workspace: Path) -> list[str]:
    label = f"tracker {name}"
    tracker = isolated(label, "", make, redirect=False)
    if isinstance(tracker, Failure):
        return [_lacks(name, "past runs", tracker)]
    notes: list[str] = []
    failures: dict[str, str] = {}
    for record in list_runs(workspace)[-NEWEST:]:
        found = isolated(label, "", lambda record=record: _synced(tracker, record), redirect=False)  # type: ignore[misc]
        if not isinstance(found, Failure):
            notes.extend(found)
        elif found.error in failures:
            # What befalls two runs alike is the tracker's trouble, such as a server that is away.
            return [*notes, _lacks(name, "past runs", found)]
        else:
            failures[found.error] = _lacks(name, f"run {record.run}", found)
    return [*notes, *failures.values()]


def _synced(tracker: Any, record: RunRecord) -> list[str]:
    if record.live or not tracker.behind(record.workspace, record.run):
        return []
    return list(tracker.sync(record.workspace, record.run) or ())


def _lacks(name: str, what: str, failure: Failure) -> str:
    return f"{name} lacks {what} ({failure.error}); `posttrain sync` replays them all"
