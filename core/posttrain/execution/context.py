"""The worker's side of a stage: what its target is given, and the event stream it writes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import FACTS_OF, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Cell, Level, Port, Stage
from posttrain.errors import StageError
from posttrain.execution.protocol import Metrics, Note, Progress, Request, Table
from posttrain.planning.secrets import Redactor, resolve
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import resolve as resolve_component
from posttrain.wording import either

_PROGRESS_INTERVAL = 0.2
"""Seconds between two progress events; metrics are never dropped."""


class EventLog:
    """Appends events to one file, one whole line a write, so that a reader never sees two lines mixed."""

    def __init__(self, path: Path, redactor: Redactor) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._redactor = redactor

    def write(self, event: Progress | Metrics | Table | Note) -> None:
        """Append one event, without the stage's secrets in any of its texts and names."""
        shown = self._redactor.value(event.model_dump(mode="json"))
        os.write(self._descriptor, json.dumps(shown, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass(frozen=True)
class Described:
    """What a stage says of one of its outputs."""

    kind: Kind
    facts: Any


class WorkerContext:
    """Implements `posttrain.contracts.stage.StageContext` over a request, a store and an event log."""

    def __init__(
        self,
        request: Request,
        stage: Stage,
        config: Any,
        *,
        store: Store,
        catalogue: Catalogue,
        events: EventLog,
        stopping: Callable[[], bool],
    ) -> None:
        self.node = request.node
        self.stage = stage
        self.config = config
        self.work = Path(request.work)
        self.base = Path(request.base)
        self.workspace = Path(request.workspace)
        self.inputs: Mapping[str, Sequence[Artifact]] = {
            port: [store.get(digest) for digest in digests] for port, digests in request.inputs.items()
        }
        self.directories: dict[str, Path] = {}
        self.described: dict[str, Described] = {}
        self._ports = {port.name: port for port in stage.outputs(config)}
        self._declared: Collection[str] = request.secrets
        self._store = store
        self._catalogue = catalogue
        self._events = events
        self._stopping = stopping
        self._last_progress = -math.inf
        self._said: set[str] = set()

    def input(self, port: str) -> Artifact:
        """Return the single artifact of an input port.

        Raises:
            StageError: The port is not connected, or holds several artifacts.
        """
        artifacts = self.inputs.get(port, ())
        if len(artifacts) != 1:
            raise StageError(
                f"input port {port!r} does not hold exactly one artifact",
                where=self.node,
                found=len(artifacts),
                expected="one artifact; `context.inputs` serves optional ports and ports that take many",
            )
        return artifacts[0]

    def output(self, port: str) -> Path:
        """Return the directory to fill for an output port; the same one at every call."""
        self._known(port)
        if port not in self.directories:
            self.directories[port] = self._store.scratch(f"{self.node}.{port}")
        return self.directories[port]

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        """State kind and facts of an output; called once for each port."""
        allowed = self._known(port)
        if port in self.described:
            raise StageError(f"output port {port!r} was described twice", where=self.node)
        if kind not in allowed.kinds:
            raise StageError(
                f"output port {port!r} was given the wrong kind of artifact",
                where=self.node,
                found=kind,
                expected=either(allowed.kinds),
            )
        if not isinstance(facts, FACTS_OF[kind]):
            raise StageError(
                f"output port {port!r} was described with the wrong kind of facts",
                where=self.node,
                found=type(facts).__name__,
                expected=FACTS_OF[kind].__name__,
            )
        self.described[port] = Described(kind, facts)

    def component(self, choice: Choice, group: str) -> Component:
        """Load the component a config field names."""
        return resolve_component(choice, Group(group), self._catalogue)

    def artifact(self, digest: str) -> Artifact:
        """Look an artifact up in the store."""
        return self._store.get(digest)

    def secret(self, reference: str) -> str:
        """Resolve a declared `env:NAME`.

        Raises:
            StageError: The stage's options do not declare it.
            SpecError: The environment variable is not set.
        """
        if reference.removeprefix("env:") not in self._declared:
            raise StageError(
                "this stage asked for a secret that its options do not declare",
                where=self.node,
                found=reference,
                expected=", ".join(f"env:{name}" for name in self._declared) or "no secret at all",
                fix="give the option that holds it the type `Secret`",
            )
        return resolve(reference, os.environ)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Tell how far the stage is; calls that come too fast are left out, the last one never."""
        now = time.monotonic()
        if done != total and now - self._last_progress < _PROGRESS_INTERVAL:
            return
        self._last_progress = now
        self._events.write(Progress(time=time.time(), done=done, total=total, unit=unit))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Stream metrics of one step. What is not finite is left out, and a note says so."""
        finite = self.finite(values, f"at step {step}")
        self._events.write(Metrics(time=time.time(), step=step, values=finite))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Show rows at one step."""
        plain = [dict(row) for row in rows]
        self._events.write(Table(time=time.time(), name=name, step=step, rows=plain))

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        """Say something to the person who watches, once."""
        self._once(message, message, level)

    @property
    def stopping(self) -> bool:
        """Whether the stage was asked to checkpoint and stop."""
        return self._stopping()

    def finite(self, values: Mapping[str, float], when: str) -> dict[str, float]:
        """Return the values that JSON can hold; a note tells about each other one, once for each name."""
        numbers = {name: float(value) for name, value in values.items()}
        for name, value in numbers.items():
            if not math.isfinite(value):
                self._once(f"not finite: {name}", f"{name} is not finite {when} ({value}); left out")
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def discard(self) -> None:
        """Remove unfinished outputs."""
        for directory in self.directories.values():
            self._store.discard(directory)

    def _once(self, about: str, message: str, level: Level = Level.WARNING) -> None:
        if about not in self._said:
            self._said.add(about)
            self._events.write(Note(time=time.time(), level=level, message=message))

    def _known(self, port: str) -> Port:
        if port not in self._ports:
            raise StageError(
                f"there is no output port {port!r}",
                where=self.node,
                expected=f"one of {', '.join(self._ports)}" if self._ports else "no outputs",
            )
        return self._ports[port]
