"""Runs on disk: where one keeps its record, how it is created, found, claimed, and how it stands."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.artifacts.files import guarded, write_durably
from posttrain.artifacts.locks import attempt, held
from posttrain.artifacts.manifest import digest_of
from posttrain.contracts.runner import NodeStatus
from posttrain.errors import SpecError, StoreError
from posttrain.execution.journal import (
    JOURNAL,
    Journal,
    NodeEnded,
    NodeStarted,
    RunEnded,
    RunStarted,
    read_journal,
)

RUNS = "runs"
PIPELINE = "pipeline.json"
PLAN = "plan.json"
_LOCK = "run.lock"
_CLAIM_TRIES = 10
_CLAIM_PAUSE = 0.05


@dataclass(frozen=True)
class RunRecord:
    """One run's directory.

    Args:
        workspace: The `.posttrain` directory.
        run: The run's id.
    """

    workspace: Path
    run: str

    @property
    def directory(self) -> Path:
        """Where the run keeps its record."""
        return self.workspace / RUNS / self.run

    @property
    def journal(self) -> Journal:
        """The run's journal."""
        return Journal(self.directory)

    def pipeline(self) -> dict[str, Any]:
        """Return what `pipeline.json` holds.

        Raises:
            StoreError: It is missing or damaged.
        """
        path = self.directory / PIPELINE
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise StoreError("this run's pipeline cannot be read", where=str(path), found=error) from error
        return found

    def stage(self, node: str) -> Path:
        """Return the directory of a node's attempts."""
        return self.directory / "stages" / _directory_name(node)

    @property
    def live(self) -> bool:
        """Whether a process works on the run now."""
        return held(self.directory / _LOCK)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the run: a lock that no other process gets and that ends with this process, however it ends.

        Raises:
            StoreError: Another process works on the run.
        """
        path = self.directory / _LOCK
        with guarded(path, "claim the run"):
            for _ in range(_CLAIM_TRIES):
                # `live` takes the same lock for a moment, so one refusal does not mean much.
                if (lock := attempt(path)) is not None:
                    break
                time.sleep(_CLAIM_PAUSE)
            else:
                raise StoreError(
                    f"run {self.run} is running already",
                    where=str(path),
                    fix="wait for it, or stop that process",
                )
        with lock:
            self.journal.mend()
            yield


def create_run(
    workspace: Path, pipeline: Mapping[str, Any], plan: Mapping[str, Any] | None = None
) -> RunRecord:
    """Make a new run's directory.

    Args:
        workspace: The `.posttrain` directory.
        pipeline: The spec snapshot and whatever else is needed to build the same graph again; no secrets.
        plan: The plan at start.
    """
    root = Path(workspace).absolute()
    with guarded(root / RUNS, "create a run"):
        record = _fresh(root)
        write_durably(record.directory / PIPELINE, _pretty(pipeline))
        if plan is not None:
            write_durably(record.directory / PLAN, _pretty(plan))
    return record


def _fresh(workspace: Path) -> RunRecord:
    """Make a directory under an id that sorts by time, to 1/256 of a second (UTC)."""
    while True:
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        record = RunRecord(workspace, f"{stamp}-{int(now % 1 * 256):02x}{secrets.token_hex(1)}")
        try:
            record.directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return record


def _pretty(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def list_runs(workspace: Path) -> list[RunRecord]:
    """Return all runs that have begun, oldest first."""
    root = Path(workspace).absolute() / RUNS
    found = sorted(path.parent.name for path in root.glob(f"*/{JOURNAL}"))
    return [RunRecord(Path(workspace).absolute(), name) for name in found]


def matching_runs(workspace: Path, text: str) -> list[RunRecord]:
    """Return the run of this id, or else all whose id begins or ends so, oldest first."""
    runs = list_runs(workspace)
    return [each for each in runs if each.run == text] or [
        each for each in runs if each.run.startswith(text) or each.run.endswith(text)
    ]


def find_run(workspace: Path, text: str | None = None) -> RunRecord:
    """Return the run that an id, its beginning or its end means; the newest one for None.

    Raises:
        SpecError: None or more than one has the id.
        StoreError: There is no run at all.
    """
    runs = list_runs(workspace)
    matching = runs[-1:] if text is None else matching_runs(workspace, text)
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(record.run for record in (matching or runs)[-5:])
    wrong = StoreError if text is None else SpecError
    raise wrong(
        "several runs have such an id" if matching else "there is no such run",
        where=str(Path(workspace) / RUNS),
        found=text,
        expected=f"one of {known}" if known else None,
        fix="`posttrain status` lists the runs" if known else "`posttrain run` starts one",
    )


@dataclass(frozen=True)
class NodeState:
    """How a node of a run stands."""

    node: str
    uses: str
    status: NodeStatus
    attempts: int = 0
    started: float | None = None
    ended: NodeEnded | None = None


@dataclass(frozen=True)
class RunState:
    """How a run stands, read from its journal.

    Args:
        record: The run.
        status: `running`, `killed` (no end in the journal and no process), `damaged`, or how it ended.
        pipeline: The pipeline's name.
        runner: The runner of its last start.
        pid: The process of its last start.
        started: When it first began, seconds since the epoch.
        ended: When it ended.
        resumed: How often it was resumed.
        nodes: The nodes that came up so far.
        damage: What is wrong with the journal; the rest is then what could be read before it.
    """

    record: RunRecord
    status: str
    pipeline: str
    runner: str
    pid: int
    started: float
    ended: float | None
    resumed: int
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    damage: StoreError | None = None


def run_state(record: RunRecord) -> RunState:
    """Return how a run stands; one with a damaged journal says so and does not hide the others.

    Raises:
        StoreError: It has no journal.
    """
    # Asked before the journal is read: a run that ends in between then shows its end, never as killed.
    live = record.live
    entries, damage = _readable(record)
    starts = [entry for entry in entries if isinstance(entry, RunStarted)]
    if not starts or damage is not None:
        return _damaged(record, entries, starts, damage)
    last = entries.index(starts[-1])
    end = next((entry for entry in entries[last:] if isinstance(entry, RunEnded)), None)
    return RunState(
        record=record,
        status=end.status if end is not None else "running" if live else "killed",
        pipeline=starts[-1].pipeline,
        runner=starts[-1].runner,
        pid=starts[-1].pid,
        started=starts[0].time,
        ended=None if end is None else end.time,
        resumed=len(starts) - 1,
        nodes=_node_states(entries, running=end is None and live),
    )


def _readable(record: RunRecord) -> tuple[list[Any], StoreError | None]:
    """Return the entries up to the first damage, and the damage."""
    entries: list[Any] = []
    journal = read_journal(record.directory)
    if not (record.directory / JOURNAL).exists():
        return list(journal), None
    try:
        entries.extend(journal)
    except StoreError as error:
        return entries, error
    return entries, None


def _damaged(
    record: RunRecord, entries: list[Any], starts: list[RunStarted], damage: StoreError | None
) -> RunState:
    path = record.directory / JOURNAL
    last = starts[-1] if starts else None
    return RunState(
        record=record,
        status="damaged",
        pipeline="" if last is None else last.pipeline,
        runner="" if last is None else last.runner,
        pid=0 if last is None else last.pid,
        started=starts[0].time if starts else path.stat().st_mtime,
        ended=None,
        resumed=max(0, len(starts) - 1),
        nodes=_node_states(entries, running=False),
        damage=damage or StoreError("this run's journal has no beginning", where=str(path)),
    )


def _node_states(entries: list[Any], running: bool) -> dict[str, NodeState]:
    states: dict[str, NodeState] = {}
    for entry in entries:
        before = states.get(entry.node) if isinstance(entry, NodeStarted | NodeEnded) else None
        if isinstance(entry, RunStarted) and running:
            # A resumed run comes to every node again; what stopped it last time is no longer how it stands.
            states = {
                name: state if state.status.passes else replace(state, status=NodeStatus.PENDING, ended=None)
                for name, state in states.items()
            }
        elif isinstance(entry, NodeStarted):
            status = NodeStatus.RUNNING if running else NodeStatus.INTERRUPTED
            states[entry.node] = NodeState(entry.node, entry.uses, status, entry.attempt, entry.time)
        elif isinstance(entry, NodeEnded):
            attempts, started = (before.attempts, before.started) if before else (0, None)
            states[entry.node] = NodeState(entry.node, entry.uses, entry.status, attempts, started, entry)
    return states


def require_resumable(record: RunRecord) -> RunState:
    """Return the state of a run that can be resumed.

    Raises:
        StoreError: It is running, its journal is damaged, or there is nothing left to do.
    """
    state = run_state(record)
    if state.damage is not None:
        raise state.damage
    if state.status == "running":
        raise StoreError(
            f"run {record.run} is running",
            found=f"process {state.pid}",
            fix="wait for it, or stop that process",
        )
    if state.status == "completed":
        raise StoreError(
            f"run {record.run} is completed: there is nothing to do", fix="`posttrain run` starts another run"
        )
    return state


def _directory_name(node: str) -> str:
    """Return a file name for a node, readable where possible and unique always."""
    readable = re.sub(r"[^\w\[\]=,.@+-]", "_", node)
    if readable == node and len(node) <= 120 and not node.startswith("."):
        return node
    return f"{readable[:100].lstrip('.')}~{digest_of(node)[:12]}"
