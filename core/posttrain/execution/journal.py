"""The journal: the authoritative, append-only record of a run.

One JSON object a line, fsynced. Every projection (terminal, MLflow, Prefect, `status`) is derived from it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from posttrain.artifacts.files import guarded
from posttrain.contracts.runner import NodeStatus
from posttrain.contracts.stage import Level
from posttrain.errors import StoreError

JOURNAL = "journal.jsonl"
EVENTS = "events.jsonl"
"""What an attempt tells while it runs."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    time: float = Field(default_factory=time.time)


class RunStarted(_Entry):
    """A run began, or was resumed (`resumed` is then true)."""

    type: Literal["run-started"] = "run-started"
    run: str
    pipeline: str
    spec_digest: str
    runner: str
    pid: int
    resumed: bool = False


class NodeStarted(_Entry):
    """A worker was launched for a node."""

    type: Literal["node-started"] = "node-started"
    node: str
    uses: str
    key: str
    attempt: int
    config: dict[str, Any]
    inputs: dict[str, list[str]]


class NodeEnded(_Entry):
    """A node came to its end in this run; `key` is None when it was skipped."""

    type: Literal["node-ended"] = "node-ended"
    node: str
    uses: str
    key: str | None = None
    attempt: int | None = None
    status: NodeStatus
    outputs: dict[str, str] = {}
    inputs: dict[str, list[str]] = {}
    config: dict[str, Any] = {}
    figures: dict[str, float] = {}
    seconds: float = 0.0
    summary: str = ""
    error: dict[str, Any] | None = None


class RunNote(_Entry):
    """Something about the run as a whole, such as a tracker's outage."""

    type: Literal["note"] = "note"
    level: Level = Level.NOTE
    message: str


class RunEnded(_Entry):
    """The run came to its end. A run without this entry whose process is gone was killed."""

    type: Literal["run-ended"] = "run-ended"
    status: Literal["completed", "rejected", "inconclusive", "failed", "interrupted"]


Entry = Annotated[RunStarted | NodeStarted | NodeEnded | RunNote | RunEnded, Field(discriminator="type")]
_ENTRY: TypeAdapter[RunStarted | NodeStarted | NodeEnded | RunNote | RunEnded] = TypeAdapter(Entry)


class Journal:
    """Appends entries to one run's journal; safe to use from several threads of one process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL
        self._lock = threading.Lock()

    def append(self, entry: RunStarted | NodeStarted | NodeEnded | RunNote | RunEnded) -> None:
        """Write one entry and force it to disk; one that cannot be written whole leaves no trace.

        Raises:
            StoreError: The disk is full, or the journal cannot be written.
        """
        line = memoryview(entry.model_dump_json().encode() + b"\n")
        with self._lock, self._extended() as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), before)
                raise

    @contextmanager
    def _extended(self) -> Iterator[FileIO]:
        with guarded(self.path, "go on with the run's journal"), self.path.open("ab", buffering=0) as file:
            yield file

    def mend(self) -> None:
        """Cut off a torn last line, so that the next entry begins a line of its own.

        Only for whoever has claimed the run: another process may be in the middle of that line.
        """
        with self._lock, guarded(self.path, "mend the journal"):
            if not self.path.exists():
                return
            with self.path.open("r+b") as file:
                content = file.read()
                end = content.rfind(b"\n") + 1
                if end < len(content):
                    file.truncate(end)
                    os.fsync(file.fileno())


def read_journal(directory: Path) -> Iterator[RunStarted | NodeStarted | NodeEnded | RunNote | RunEnded]:
    """Yield the entries of a run. A last line without its end (the parent was killed meanwhile) is ignored.

    Raises:
        StoreError: There is no journal, or another line of it is damaged.
    """
    path = directory / JOURNAL
    if not path.exists():
        raise StoreError(
            "this run has no journal", where=str(path), fix="see `posttrain status` for the runs there are"
        )
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            yield _ENTRY.validate_json(line)
        except ValueError as error:
            raise StoreError(
                "this journal is damaged",
                where=f"{path}:{number}",
                found=error,
                fix="start another run: what is in the store is reused",
            ) from error


def node_ends(directory: Path) -> Mapping[str, NodeEnded]:
    """Return the last end of every node of a run."""
    return {entry.node: entry for entry in read_journal(directory) if isinstance(entry, NodeEnded)}


def events_of(attempt: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield what an attempt told of one type, in order. A last line without its end is ignored.

    Args:
        attempt: Its directory.
        kind: The type of event.

    Raises:
        StoreError: A line is damaged.
    """
    path = attempt / EVENTS
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            wanted = event["type"] == kind
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                "this record of a stage is damaged",
                where=f"{path}:{number}",
                found=error,
                fix="remove the line: nothing but curves and tables depends on it",
            ) from error
        if wanted:
            yield event


def tail_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete event lines after `offset`, and the offset to go on from."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read()
    end = chunk.rfind(b"\n") + 1
    return [json.loads(line) for line in chunk[:end].splitlines() if line], offset + end
