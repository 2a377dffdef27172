"""The command-line verbs `sync`, `ui` and `down`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import PosttrainError
from posttrain.execution.records import find_run, list_runs
from posttrain_pipelines import services

Workspace = Annotated[Path, typer.Option(help="The workspace directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def sync(
    run: Annotated[str | None, typer.Argument(help="A run; all of them when left out.")] = None,
    workspace: Workspace = Path(".posttrain"),
    as_json: AsJson = False,
) -> None:
    """Bring MLflow up to date with the records of past runs."""
    from posttrain_pipelines.tracking.tracker import MlflowTracker

    workspace = workspace.absolute()
    tracker = MlflowTracker()
    behind = [name for name in _runs(workspace, run) if tracker.behind(workspace, name)]
    problems = {}
    for name in behind:
        try:
            tracker.sync(workspace, name)
        except PosttrainError as error:
            problems[name] = error
    synced = [name for name in behind if name not in problems]
    if as_json:
        _say(
            json.dumps(
                {"synced": synced, "failed": {name: problem.as_dict() for name, problem in problems.items()}}
            )
        )
    else:
        _say(f"brought up to date: {', '.join(synced)}" if synced else "nothing to bring up to date")
        for name, problem in problems.items():
            _say(f"{name}: {problem}")
    if problems:
        raise typer.Exit(1)


def ui(workspace: Workspace = Path(".posttrain"), as_json: AsJson = False) -> None:
    """Start the pages of Prefect and MLflow on this machine; `posttrain down` stops them."""
    from posttrain_pipelines.flow import server as prefect
    from posttrain_pipelines.tracking import server as mlflow

    workspace = workspace.absolute()
    pages = {
        "prefect": prefect.configured_api() or prefect.ensure_server(workspace).url,
        "mlflow": mlflow.configured_server() or mlflow.ensure_server(workspace).url,
    }
    pages = {name: url.removesuffix("/api") for name, url in pages.items()}
    _say(json.dumps(pages) if as_json else "\n".join(f"{name:8} {url}" for name, url in pages.items()))


def down(workspace: Workspace = Path(".posttrain"), as_json: AsJson = False) -> None:
    """Stop the local servers that were started here."""
    stopped = [service.name for service in services.stop(workspace.absolute())]
    if as_json:
        _say(json.dumps({"stopped": stopped}))
    else:
        _say(f"stopped: {', '.join(stopped)}" if stopped else "no server was running")


def _runs(workspace: Path, run: str | None) -> list[str]:
    """Return the runs to look at, oldest first: models get linked to the runs that made them."""
    return [record.run for record in (list_runs(workspace) if run is None else [find_run(workspace, run)])]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
