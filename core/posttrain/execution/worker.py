"""The stage process: reads a request, runs one stage, seals what it made, and writes one result.

Whatever a stage does (raise, return nonsense, describe half of its outputs), the result says so; the
traceback goes to the process's standard error, which the launcher keeps in `output.log`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from posttrain.artifacts.files import is_full, write_durably
from posttrain.artifacts.kinds import DatasetFacts
from posttrain.artifacts.store import Store
from posttrain.contracts.registration import load_target
from posttrain.contracts.stage import Outcome, Port, Stage
from posttrain.contracts.trainer import Trainer
from posttrain.errors import ExitCode, Interrupted, PluginError, SpecError, StageError
from posttrain.execution.blame import explain
from posttrain.execution.context import EventLog, WorkerContext
from posttrain.execution.journal import EVENTS
from posttrain.execution.liveness import adopt_descriptors
from posttrain.execution.machine import take_threads, uncollected, used_device, used_threads, used_versions
from posttrain.execution.protocol import Output, Request, Result
from posttrain.execution.signals import Stop, on_stop_signals, worker_handler
from posttrain.planning.keys import differences, plugin_identities
from posttrain.planning.secrets import Redactor
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices, validate_config
from posttrain.registry.discovery import discover
from posttrain.wording import either

RESULT = "result.json"
UNSTORED = os.EX_CANTCREAT
"""How a worker exits that had no room to store its result."""
_EXIT_CODE = {"ok": ExitCode.OK, "failed": ExitCode.FAILED, "stopped": ExitCode.INTERRUPTED}


def main(argv: Sequence[str]) -> int:
    """Run the stage of the request file `argv[0]` in this process, which is its own."""
    if len(argv) != 1:
        print("usage: python -m posttrain.execution request.json", file=sys.stderr)  # noqa: T201
        return ExitCode.INVALID
    adopt_descriptors()
    stop = Stop()
    with on_stop_signals(worker_handler(stop)):
        return run(Path(argv[0]), lambda: stop.requested)


def run(path: Path, stopping: Callable[[], bool], *, log: TextIO | None = None, debug: bool = False) -> int:
    """Run a request, write its result beside the events and return the exit code.

    Args:
        path: The request file.
        stopping: Whether the stage should checkpoint and stop.
        log: Where an exception's traceback goes; standard error by default.
        debug: Let the stage's exceptions through.

    Raises:
        SpecError: The request file cannot be read.
    """
    request = read_request(path)
    try:
        result = execute(request, stopping, log=log or sys.stderr, debug=debug)
        write_durably(Path(request.directory) / RESULT, result.model_dump_json().encode())
    except OSError as error:
        if not is_full(error):
            raise
        return UNSTORED
    return _EXIT_CODE[result.status]


def read_request(path: Path) -> Request:
    """Return the request in a file."""
    try:
        return Request.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise SpecError("this request cannot be read", where=str(path), found=error) from error


def execute(request: Request, stopping: Callable[[], bool], *, log: TextIO, debug: bool = False) -> Result:
    """Run a request and return its result; outputs of a stage that did not succeed are removed."""
    redactor = Redactor(_secrets(request))
    task = _Task(request, stopping, redactor)
    try:
        return task.perform()
    except Interrupted as error:
        task.discard()
        return Result(status="stopped" if stopping() else "failed", error=redactor.value(error.as_dict()))
    except KeyboardInterrupt:
        task.discard()
        raise
    except (Exception, SystemExit) as error:
        task.discard()
        if debug:
            raise
        told = _traceback(error, redactor)
        log.write(told)
        log.flush()
        account = redactor.value(explain(error, task.targets, Path(request.workspace)))
        return Result(status="failed", error=account, traceback=told)


def _traceback(error: BaseException, redactor: Redactor) -> str:
    """Return an error's traceback with the characters that standard error gives it."""
    text = redactor.text("".join(traceback.format_exception(error)))
    return text.encode(errors="backslashreplace").decode()


def _secrets(request: Request) -> list[str]:
    return [os.environ[name] for name in request.secrets if name in os.environ]


class _Task:
    """One stage from request to sealed outputs."""

    def __init__(self, request: Request, stopping: Callable[[], bool], redactor: Redactor) -> None:
        self.request = request
        self.targets: list[str] = []
        self._stopping = stopping
        self._redactor = redactor
        self._context: WorkerContext | None = None

    def perform(self) -> Result:
        """Run the stage."""
        request = self.request
        catalogue = discover([Path(file) for file in request.plugins])
        stage = catalogue.stage(request.uses)
        config = validate_config(stage.config, request.config, catalogue)
        _require_same_plugins(request, config, catalogue)
        self.targets = [stage.target, *_component_targets(config, catalogue)]
        take_threads()
        with uncollected():
            target = load_target(stage.target)
        take_threads()
        events = EventLog(Path(request.directory) / EVENTS, self._redactor)
        try:
            context = self._prepare(stage, config, catalogue, events)
            outcome = _checked(stage, request, target(context))
            figures = context.finite(outcome.figures, "at the end")
        finally:
            events.close()
        return Result(
            status="ok",
            verdict=outcome.verdict,
            outputs=self._seal(stage, config, context),
            figures=self._redactor.value(figures),
            steps=outcome.steps,
            summary=self._redactor.text(outcome.summary),
            versions=used_versions(),
            device=used_device(request.device),
            threads=used_threads(request.threads),
        )

    def discard(self) -> None:
        """Remove unfinished outputs."""
        if self._context is not None:
            self._context.discard()

    def _prepare(self, stage: Stage, config: Any, catalogue: Catalogue, events: EventLog) -> WorkerContext:
        self._context = WorkerContext(
            self.request,
            stage,
            config,
            store=Store(Path(self.request.workspace)),
            catalogue=catalogue,
            events=events,
            stopping=self._stopping,
        )
        return self._context

    def _seal(self, stage: Stage, config: Any, context: WorkerContext) -> list[Output]:
        store = Store(context.workspace)
        outputs = []
        for port in stage.outputs(config):
            _complete(port, context, self.request)
            directory, described = context.directories[port.name], context.described[port.name]
            manifest = store.seal(directory, described.kind, described.facts)
            outputs.append(
                Output(port=port.name, kind=described.kind, digest=manifest.digest, sealed=str(directory))
            )
        return outputs


def _require_same_plugins(request: Request, config: Any, catalogue: Catalogue) -> None:
    """Refuse to build under a key that was computed for other plugins, such as an edited file."""
    if not request.identities:
        return
    here = plugin_identities(request.uses, config, catalogue)
    if here != request.identities:
        raise PluginError(
            f"the plugins of {request.uses} are not those that the run was started with",
            where=request.node,
            found="; ".join(differences(request.identities, here)),
            fix="start the run again, with the same plugins in every interpreter",
        )


def _component_targets(config: Any, catalogue: Catalogue) -> Iterator[str]:
    """Yield where the components that a config names come from; those of local files have no module."""
    for _, choice, group in choices(config):
        target = catalogue.entry(group, choice.name).registration.target
        if isinstance(target, str):
            yield target


def _checked(stage: Stage, request: Request, outcome: object) -> Outcome:
    """Return what the target returned if it counts as a success."""
    if not isinstance(outcome, Outcome):
        raise StageError(
            f"the target of {request.uses} did not return an Outcome",
            where=stage.target,
            found=type(outcome).__name__,
            expected="posttrain.Outcome",
        )
    if isinstance(stage, Trainer) and not outcome.steps:
        raise StageError(
            f"{request.uses} advanced no step, so it trained nothing",
            where=request.node,
            found="no step count" if outcome.steps is None else "0 steps",
            expected="at least 1 optimizer step",
            fix="check that rows are left after filtering and that the number of steps is positive",
        )
    return outcome


def _complete(port: Port, context: WorkerContext, request: Request) -> None:
    """Refuse an output that the stage did not write or did not describe as its port says."""
    if port.name not in context.directories or port.name not in context.described:
        missing = "write to" if port.name not in context.directories else "describe"
        raise StageError(
            f"{request.uses} did not {missing} its output port {port.name!r}",
            where=request.node,
            expected=f"context.output({port.name!r}) and context.describe({port.name!r}, …)",
            fix=f"this is a fault of the plugin that provides {request.uses}",
        )
    facts = context.described[port.name].facts
    if port.formats and isinstance(facts, DatasetFacts) and facts.format not in port.formats:
        raise StageError(
            f"{request.uses} put a dataset of another format out of port {port.name!r}",
            where=request.node,
            found=facts.format,
            expected=either(port.formats),
        )
