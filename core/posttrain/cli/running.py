"""The verbs that plan and run: `plan`, `run`, `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import (
    AS_WRITTEN,
    DEFAULT_WORKSPACE,
    Json,
    Sets,
    Voice,
    Workspace,
    print_json,
    printable,
    reserved,
    say,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from posttrain.execution.session import RunReport, RunStatus
    from posttrain.pipeline import Pipeline, Selection
    from posttrain.planning.plan import Plan


def _pipelines(incomplete: str) -> list[str]:
    """Return what may stand for PIPELINE: recipes and pipeline files here."""
    from pathlib import Path

    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover

    files = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    return sorted(name for name in [*discover().names(Group.RECIPE), *files] if name.startswith(incomplete))


Spec = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="A pipeline file, or the name of a recipe.", autocompletion=_pipelines
    ),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="STAGE", help="Run this stage and what it needs.")
]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--from", metavar="STAGE", help="Run this stage and what follows; what comes before must be cached."
    ),
]
Tiny = Annotated[bool, typer.Option("--tiny", help="A smoke run: every stage at its smallest.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the final table.")]
RunnerName = Annotated[
    str | None,
    typer.Option("--runner", help="prefect, sequential, process, or inline (this process, for a debugger)."),
]


def plan(
    pipeline: Spec,
    sets: Sets = None,
    only: Only = None,
    start: From = None,
    tiny: Tiny = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show what a run would do and why; starts nothing."""
    from posttrain.pipeline import Pipeline

    with reserved(as_json):
        loaded = Pipeline.find(pipeline, sets or ())
        planned = loaded.plan(workspace.absolute(), _selection(only, start, tiny))
    if as_json:
        print_json(planned.as_dict())
    else:
        from posttrain.cli.planview import show_plan

        warn(planned.warnings)
        show_plan(planned)
    if planned.refused or planned.unbuilt:
        raise typer.Exit(2)


def run(
    pipeline: Spec,
    sets: Sets = None,
    only: Only = None,
    start: From = None,
    tiny: Tiny = False,
    runner: RunnerName = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a pipeline; what is cached is reused."""
    from posttrain.pipeline import Pipeline

    with reserved(as_json):
        loaded = Pipeline.find(pipeline, sets or ())
    selection = _selection(only, start, tiny)
    perform(loaded, workspace.absolute(), selection, runner=runner, quiet=quiet, as_json=as_json)


def perform(
    loaded: Pipeline,
    workspace: Path,
    selection: Selection,
    *,
    runner: str | None = None,
    quiet: bool = False,
    as_json: bool = False,
    voice: Voice = AS_WRITTEN,
) -> Mapping[str, Mapping[str, str]]:
    """Plan a pipeline, run what is not cached, and report in that voice; return digests by node and port.

    Raises:
        PosttrainError: It is refused.
        typer.Exit: It did not complete.
    """
    from posttrain.pipeline import require_allowed, require_room

    with reserved(as_json):
        loaded.require_runner(runner)
        planned = loaded.plan(workspace, selection)
    if not as_json:
        warn(planned.warnings, voice)
    require_allowed(planned)
    require_room(planned)
    if planned.nothing_to_do:
        _nothing_to_do(loaded, planned, workspace, quiet=quiet, as_json=as_json, voice=voice)
        return {name: node.record.outputs for name, node in planned.nodes.items() if node.record is not None}
    from posttrain.cli.live import view

    with reserved(as_json), view(planned.graph.order, quiet=quiet or as_json, voice=voice) as watching:
        report = loaded.run(
            workspace, runner=runner, selection=selection, observer=watching.observe, plan=planned
        )
    _conclude(report, workspace, planned.warnings, watching.warnings, as_json=as_json, voice=voice)
    return {name: result.outputs for name, result in report.results.items()}


def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run; when left out, the newest that broke off and that no later one of its pipeline replaced."
        ),
    ] = None,
    runner: RunnerName = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that was interrupted, was killed, or failed."""
    from posttrain.cli.live import view
    from posttrain.execution.resumption import resumable
    from posttrain.pipeline import Pipeline

    workspace = workspace.absolute()
    with reserved(as_json):
        record = resumable(workspace, run)
        recorded = Pipeline.recorded(record)[0]
        warnings = tuple(recorded.warnings)
    if not as_json:
        warn(warnings)
        if run is None and not quiet:
            say(f"going on with run {record.run} of {printable(recorded.name)}")
    with reserved(as_json), view((), quiet=quiet or as_json) as watching:
        report = Pipeline.resume(workspace, record.run, runner=runner, observer=watching.observe)
    _conclude(report, workspace, warnings, watching.warnings, as_json=as_json)


def _selection(only: list[str] | None, start: list[str] | None, tiny: bool) -> Selection:
    from posttrain.pipeline import Selection

    return Selection(tuple(only or ()), tuple(start or ()), tiny)


def _nothing_to_do(
    loaded: Pipeline, planned: Plan, workspace: Path, *, quiet: bool, as_json: bool, voice: Voice
) -> None:
    """Report a fully cached pipeline; trackers are brought up to date only where they lack something."""
    from posttrain.contracts.runner import NodeStatus
    from posttrain.execution.session import overall

    with reserved(as_json):
        notes = loaded.catch_up(workspace)
    ended = {"rejected": NodeStatus.REJECTED, "inconclusive": NodeStatus.INCONCLUSIVE}
    records = [node.record for node in planned.nodes.values() if node.record is not None]
    status = overall(ended.get(record.status, NodeStatus.CACHED) for record in records)
    if as_json:
        print_json({**planned.as_dict(), "status": status, "notes": notes})
    else:
        from posttrain.cli.planview import show_cached

        warn(notes, voice)
        show_cached(planned, quiet=quiet)
    _leave(status)


def _conclude(
    report: RunReport,
    workspace: Path,
    warnings: tuple[str, ...],
    heard: list[str],
    *,
    as_json: bool,
    voice: Voice = AS_WRITTEN,
) -> None:
    if as_json:
        print_json({**_as_dict(report), "warnings": [*warnings, *heard]})
    else:
        from posttrain.cli.reportview import show_report

        show_report(report, workspace, heard, voice)
    _leave(report.status)


def _leave(status: RunStatus) -> None:
    from posttrain.execution.session import exit_code

    if code := exit_code(status):
        raise typer.Exit(int(code))


def _as_dict(report: RunReport) -> dict[str, Any]:
    return {
        "run": report.run,
        "status": report.status,
        "nodes": [
            {
                "node": result.node,
                "status": result.status.value,
                "seconds": result.seconds,
                "outputs": dict(result.outputs),
                "figures": dict(result.figures),
                "summary": result.summary,
                "error": result.error,
            }
            for result in report.results.values()
        ],
    }
