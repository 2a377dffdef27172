"""The MLflow tracker: one parent run, one nested run for each node, filled in as the journal grows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.store import Store
from posttrain.contracts.runner import NodeStatus
from posttrain.execution.records import RunRecord
from posttrain.planning.secrets import Redactor
from posttrain_pipelines.redaction import redactor_of
from posttrain_pipelines.tracking import inspection, watermark
from posttrain_pipelines.tracking.connection import (
    connect,
    speaking,
    sqlite_path,
    store_identity,
    tracking_lock,
    tracking_uri,
)
from posttrain_pipelines.tracking.lineage import Lineage
from posttrain_pipelines.tracking.measures import measures_of
from posttrain_pipelines.tracking.registry import Conflict, reconcile
from posttrain_pipelines.tracking.runs import (
    NODE,
    NODE_STATUS,
    PARENT,
    RUN,
    RUN_STATUS,
    TrackedRun,
    experiment_of,
    runs_of,
)
from posttrain_pipelines.tracking.tables import tables_of
from posttrain_pipelines.tracking.view import RUNNING, NodeView, RunView, view_run

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient


@dataclass
class _Session:
    """What this process knows of one run in MLflow, valid as long as nobody else projects it."""

    client: MlflowClient
    experiment: str
    known: dict[str, Run]
    lineage: Lineage
    runs: dict[str, TrackedRun] = field(default_factory=dict)


class MlflowTracker:
    """Projects runs into MLflow: idempotent, and with one lock for all threads and processes."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        self._sessions: dict[tuple[Path, str], _Session] = {}
        self._threads = threading.Lock()

    def sync(self, workspace: Path, run: str) -> Sequence[str]:
        """Add what the record of `run` has and MLflow lacks; change nothing that is there.

        Returns:
            A remark for each alias that somebody else moved in MLflow.
        """
        with self._threads, tracking_lock(workspace):
            files = {"sources": watermark.sources(workspace, run), "registry": watermark.registry(workspace)}
            record = view_run(workspace, run)
            conflicts = self._project(workspace, run, record)
            if record.status != RUNNING:
                self._sessions.pop((workspace, run), None)
            known = [conflict.identity for conflict in conflicts]
            note = {"writer": self._token, **files, "status": record.status, "conflicts": known}
            watermark.write(workspace, run, note | _store(workspace))
            return [conflict.text for conflict in conflicts]

    def _project(self, workspace: Path, run: str, record: RunView) -> list[Conflict]:
        with speaking(tracking_uri(workspace)):
            session = self._session(workspace, run, record)
            watermark.write(workspace, run, {"writer": self._token})
            try:
                _project(session, record, workspace, redactor_of(workspace / "runs" / run))
                return reconcile(session.client, Aliases(workspace), Store(workspace))
            except BaseException:
                # what got through is unknown: read it again next time
                self._sessions.pop((workspace, run), None)
                raise

    def behind(self, workspace: Path, run: str) -> bool:
        """Whether MLflow lacks something of `run`; asks no server.

        The note of the last sync is trusted while nothing that it was made from has changed. Else a local
        database is read, without MLflow.
        """
        note, state = watermark.read(workspace, run), complete(workspace, run)
        changed = {key for key, value in state.items() if note.get(key) != value}
        unchanged = not changed or (changed == {"registry"} and watermark.newest(workspace) != run)
        if unchanged and note["status"] != RUNNING:
            return False
        record, path = view_run(workspace, run), sqlite_path(tracking_uri(workspace))
        if path is None:
            return not (unchanged and note["status"] == record.status)
        conflicts = {tuple(identity) for identity in note.get("conflicts", ())}
        if inspection.lacks(path, workspace, record, conflicts):
            return True
        if record.status != RUNNING:
            watermark.write(workspace, run, {**note, **state, "status": record.status})
        return False

    def _session(self, workspace: Path, run: str, record: RunView) -> _Session:
        known = self._sessions.get((workspace, run))
        if known is not None and watermark.read(workspace, run).get("writer") == self._token:
            return known
        client = connect(workspace)
        local = sqlite_path(tracking_uri(workspace)) is not None
        experiment = experiment_of(client, record.pipeline, workspace / "mlartifacts" if local else None)
        lineage = Lineage(client, Store(workspace), experiment)
        session = _Session(client, experiment, runs_of(client, run), lineage)
        self._sessions[workspace, run] = session
        return session


def _store(workspace: Path) -> dict[str, Any]:
    """Return what tells the tracking store apart, for a local one also from a later database at its place."""
    uri = tracking_uri(workspace)
    path = sqlite_path(uri)
    return {"store": store_identity(uri), "database": inspection.identity(path) if path else None}


def complete(workspace: Path, run: str) -> Mapping[str, Any]:
    """Return what a note must say for nothing to be lacking."""
    files = {"sources": watermark.sources(workspace, run), "registry": watermark.registry(workspace)}
    return files | _store(workspace)


def _project(session: _Session, record: RunView, workspace: Path, redactor: Redactor) -> None:
    tags = {
        RUN: record.run,
        "posttrain.pipeline": record.pipeline,
        "posttrain.spec": record.spec_digest,
        "posttrain.runner": record.runner,
    }
    parent = _tracked(session, "", record.run, record.started, tags)
    if record.status == RUNNING:
        parent.reopen()
    for node in record.nodes.values():
        if node.tracked:
            _project_node(session, parent, node, record, workspace, redactor)
    if record.status != RUNNING:
        verdict = record.status if record.status in ("rejected", "inconclusive") else ""
        parent.tag({**tags, "posttrain.status": record.status, **_verdict(parent, verdict)})
        parent.end(RUN_STATUS[record.status], record.ended or record.started)


def _project_node(
    session: _Session,
    parent: TrackedRun,
    node: NodeView,
    record: RunView,
    workspace: Path,
    redactor: Redactor,
) -> None:
    """Bring one node's run up to date. Its final status comes last, so that it stands for completeness."""
    identity = {RUN: record.run, NODE: node.node, PARENT: parent.id, "posttrain.uses": node.uses}
    tracked = _tracked(session, node.node, node.node, node.started, identity)
    if tracked.tags.get("posttrain.attempt") != str(node.attempt):
        tracked.reopen()
    tracked.tag(_tags(node, redactor) | _verdict(tracked, _verdict_of(node)))
    tracked.param(redactor.value(dict(node.config)))
    lineage, inputs = session.lineage, [digest for digests in node.inputs.values() for digest in digests]
    made = tracked.id if node.attempts else None
    tracked.link(
        lineage.datasets(node.inputs),
        lineage.models(inputs),
        lineage.models(node.outputs.values(), maker=made),
    )
    directory = RunRecord(workspace, record.run).stage(node.node)
    measures = measures_of(directory, node)
    tracked.measure(measures)
    tables = tables_of(directory, node)
    tracked.show({name: redactor.value(rows) for name, rows in tables.items()})
    if measures.nonfinite:
        tracked.tag({"posttrain.nonfinite": ", ".join(sorted(measures.nonfinite))})
    status = NODE_STATUS[node.status]
    if status != "RUNNING":
        tracked.end(status, node.ended or node.started)


def _tracked(session: _Session, node: str, name: str, started: float, tags: dict[str, str]) -> TrackedRun:
    if node not in session.runs:
        known = session.known.get(node)
        session.runs[node] = TrackedRun.find_or_create(
            session.client, known, session.experiment, name, started, tags
        )
    return session.runs[node]


def _tags(node: NodeView, redactor: Redactor) -> dict[str, str]:
    error = (node.error or {}).get("message") or ""
    texts = {"posttrain.summary": node.summary, "posttrain.error": str(error)}
    return {
        "posttrain.attempt": str(node.attempt),
        **({"posttrain.key": node.key} if node.key else {}),
        **({"posttrain.cached": "true"} if node.outputs and not node.attempts else {}),
        **{f"posttrain.output.{port}": digest for port, digest in node.outputs.items()},
        **{key: redactor.text(text) for key, text in texts.items() if text},
    }


def _verdict_of(node: NodeView) -> str:
    judged = (NodeStatus.REJECTED, NodeStatus.INCONCLUSIVE)
    return node.status.value if node.status in judged else ""


def _verdict(tracked: TrackedRun, verdict: str) -> dict[str, str]:
    """Return the verdict's tag; an empty one takes back what an earlier attempt left."""
    return {"posttrain.verdict": verdict} if verdict or "posttrain.verdict" in tracked.tags else {}
