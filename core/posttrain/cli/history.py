"""The verbs that look back: `status`, `explain`, `diff`."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, printable, say
from posttrain.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from posttrain.artifacts.store import KeyRecord, Store
    from posttrain.execution.records import RunState


def status(
    run: Annotated[str | None, typer.Argument(help="A run, to see its stages.")] = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show runs, registered models and the local servers."""
    from posttrain.execution.records import find_run, list_runs, run_state

    workspace = workspace.absolute()
    records = list_runs(workspace) if run is None else [find_run(workspace, run)]
    states = [run_state(record) for record in records]
    if as_json:
        print_json(
            {
                "runs": [_run_dict(state, nodes=run is not None) for state in states],
                "models": _models(workspace),
                "services": _services(workspace),
            }
        )
        return
    _show_runs(states)
    if run is not None:
        _show_nodes(states[0])
        return
    for model in _models(workspace):
        say(f"model {model['name']}: " + ", ".join(f"{a} → version {v}" for a, v in model["aliases"].items()))
    for service in _services(workspace):
        say(
            f"server {service['name']}: {service['url']} (process {service['pid']}); `posttrain down` stops it"
        )


def explain(
    what: Annotated[str, typer.Argument(metavar="STAGE|ARTIFACT", help="A stage, or the start of a digest.")],
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Trace a stage's outputs or an artifact back to data files and base models."""
    from posttrain.artifacts.lineage import ancestry
    from posttrain.artifacts.store import Store

    store = Store(workspace.absolute())
    trees = [ancestry(store, digest) for digest in _digests(store, what)]
    if as_json:
        print_json([tree.as_dict() for tree in trees])
        return
    for tree in trees:
        for line in tree.lines():
            say(printable(line))


def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A run, a stage, or the start of a digest.")],
    right: Annotated[str, typer.Argument(metavar="B", help="The same kind of thing.")],
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show the first differences between two runs or two artifacts; exit 1 when there are any."""
    from posttrain.artifacts.store import Store
    from posttrain.planning.comparison import compare_artifacts, compare_records

    workspace = workspace.absolute()
    store = Store(workspace)
    runs = _run_records(store, workspace, left), _run_records(store, workspace, right)
    if runs[0] is not None and runs[1] is not None:
        lines = compare_records(runs[0], runs[1])
    else:
        lines = []
        for a, b in zip(_digests(store, left), _digests(store, right), strict=False):
            lines.extend(compare_artifacts(store, store.get(a), store.get(b)))
    if as_json:
        print_json(lines)
    else:
        for line in lines or ["no difference"]:
            say(printable(line))
    if lines:
        raise typer.Exit(1)


def _digests(store: Store, what: str) -> list[str]:
    """Return the artifacts that a stage's name (its newest outputs) or a digest's start means."""
    newest = _newest(store, what)
    if newest is not None:
        return list(newest.outputs.values())
    return [store.find(what.rpartition(":")[2]).digest]


def _newest(store: Store, node: str) -> KeyRecord | None:
    records = [record for record in store.records() if record.node == node]
    return max(records, key=lambda record: record.created, default=None)


def _run_records(store: Store, workspace: Path, text: str) -> dict[str, KeyRecord] | None:
    """Return the key records of a run's nodes, or None when the text names no run."""
    from posttrain.execution.journal import node_ends
    from posttrain.execution.records import list_runs

    matching = [r for r in list_runs(workspace) if r.run.startswith(text) or r.run.endswith(text)]
    if len(matching) != 1:
        return None
    found = {}
    for node, end in node_ends(matching[0].directory).items():
        record = None if end.key is None else store.lookup(end.key)
        if record is not None:
            found[node] = record
    return found


def _show_runs(states: list[RunState]) -> None:
    from rich.table import Table

    if not states:
        say("no runs yet: `posttrain run quickstart` starts one")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("run", "pipeline", "status", "runner", "started", "stages"):
        table.add_column(heading)
    for state in states:
        done = sum(node.status.passes for node in state.nodes.values())
        table.add_row(
            state.record.run, printable(state.pipeline), state.status, state.runner,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)), f"{done}/{len(state.nodes)}",
        )  # fmt: skip
    console().print(table)
    unfinished = [state.record.run for state in states if state.status in ("killed", "interrupted", "failed")]
    if unfinished:
        say(f"go on with `posttrain resume {unfinished[-1]}`")


def _show_nodes(state: RunState) -> None:
    from posttrain.cli.planview import figures
    from posttrain.cli.reportview import duration

    for node in state.nodes.values():
        ended = node.ended
        spent = "" if ended is None else duration(ended.seconds)
        told = "" if ended is None else figures(ended.figures) or ended.summary
        say(printable(f"  {node.node:<24} {node.status.value:<12} {spent:>8}  {told}".rstrip()))
        if ended is not None and ended.error:
            say(printable(f"      {ended.error.get('message')}"))


def _run_dict(state: RunState, *, nodes: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "run": state.record.run,
        "pipeline": state.pipeline,
        "status": state.status,
        "runner": state.runner,
        "pid": state.pid,
        "started": state.started,
        "ended": state.ended,
        "resumed": state.resumed,
    }
    if nodes:
        shown["nodes"] = [
            {
                "node": node.node,
                "uses": node.uses,
                "status": node.status.value,
                "attempts": node.attempts,
                "end": None if node.ended is None else node.ended.model_dump(mode="json"),
            }
            for node in state.nodes.values()
        ]
    return shown


def _models(workspace: Path) -> list[dict[str, Any]]:
    from posttrain.artifacts.aliases import Aliases

    aliases = Aliases(workspace)
    return [
        {"name": name, "versions": len(aliases.versions(name)), "aliases": aliases.aliases(name)}
        for name in aliases.names()
    ]


def _services(workspace: Path) -> list[dict[str, Any]]:
    """Return the local servers that were started here and still run."""
    found = []
    for path in sorted((workspace / "services").glob("*.json")):
        try:
            service = json.loads(path.read_text())
        except ValueError as error:
            raise StoreError(
                "this service record is damaged", where=str(path), found=error, fix="remove it"
            ) from error
        if _alive(int(service["pid"])):
            found.append({key: service.get(key) for key in ("name", "url", "pid")})
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
