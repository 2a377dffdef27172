"""The command-line verbs `sync`, `ui` and `down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say, warn
from posttrain.errors import PosttrainError
from posttrain.execution.records import find_run, list_runs
from posttrain.planning.secrets import Redactor
from posttrain_pipelines import services
from posttrain_pipelines.tracking.connection import without_login


def sync(
    run: Annotated[str | None, typer.Argument(help="A run; all of them when left out.")] = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Bring MLflow up to date with the records of past runs."""
    with reserved(as_json):
        synced, remarks, problems = _replay(workspace.absolute(), run)
    if as_json:
        print_json({"synced": synced, "remarks": remarks, "failed": problems})
    else:
        say(f"brought up to date: {', '.join(synced)}" if synced else "nothing to bring up to date")
        warn(remarks)
        for name, problem in problems.items():
            say(f"{name}: {_line(problem)}")
    if problems:
        raise typer.Exit(1)


def _replay(workspace: Path, run: str | None) -> tuple[list[str], list[str], dict[str, dict[str, Any]]]:
    """Sync the runs that are behind, oldest first: models get linked to the runs that made them.

    Returns:
        The runs that were synced, remarks each once, and what kept the others back: one damaged run must not
        hold up the rest.
    """
    from posttrain_pipelines.tracking.tracker import MlflowTracker

    tracker = MlflowTracker()
    synced: list[str] = []
    remarks: dict[str, None] = {}
    problems: dict[str, dict[str, Any]] = {}
    for record in list_runs(workspace) if run is None else [find_run(workspace, run)]:
        try:
            if tracker.behind(workspace, record.run):
                remarks |= dict.fromkeys(tracker.sync(workspace, record.run))
                synced.append(record.run)
        except PosttrainError as error:
            problems[record.run] = error.as_dict()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others are looked at
            problems[record.run] = {"message": Redactor([]).text(f"{type(error).__name__}: {error}")}
    return synced, list(remarks), problems


def _line(problem: dict[str, Any]) -> str:
    found = problem.get("found")
    return str(problem["message"]) + (f" ({found})" if found else "")


def ui(workspace: Workspace = DEFAULT_WORKSPACE, as_json: Json = False) -> None:
    """Start the pages of Prefect and MLflow on this machine; `posttrain down` stops them."""
    from posttrain_pipelines.flow import server as prefect
    from posttrain_pipelines.tracking import server as mlflow

    workspace = workspace.absolute()
    configured = prefect.configured_api()
    with reserved(as_json):
        pages = {
            "prefect": without_login(configured) if configured else prefect.ensure_server(workspace).url,
            "mlflow": mlflow.configured_server() or mlflow.ensure_server(workspace).url,
        }
    pages = {name: url.removesuffix("/api") for name, url in pages.items()}
    password = None if configured else str(prefect.token_file(workspace))
    if as_json:
        print_json({**pages, "prefect_password_file": password})
        return
    for name, url in pages.items():
        say(f"{name:8} {url}")
    if password:
        say(f"Prefect's page asks for a password: the line in {password}")


def down(workspace: Workspace = DEFAULT_WORKSPACE, as_json: Json = False) -> None:
    """Stop the local servers that were started here."""
    stopped = [service.name for service in services.stop(workspace.absolute())]
    if as_json:
        print_json({"stopped": stopped})
    else:
        say(f"stopped: {', '.join(stopped)}" if stopped else "no server was running")
