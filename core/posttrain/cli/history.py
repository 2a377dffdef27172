"""The verbs that look back: `status`, `explain`, `diff`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli import ruleview
from posttrain.cli.meanings import artifacts_named, records_of_run
from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, printable, say, warn
from posttrain.errors import SpecError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from posttrain.artifacts.store import Store
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
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="STAGE|ARTIFACT|RULE",
            help="A stage (RUN:STAGE in one run), the start of a digest, NAME@ALIAS of a registered model, "
            "or a rule by its code, such as H012, or its name.",
        ),
    ] = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the hand-off rules.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", help="A local plugin file whose rules count too.", show_default=False),
    ] = None,
) -> None:
    """Trace a stage's outputs or an artifact back to data files and base models; or explain a hand-off rule."""
    from posttrain.artifacts.lineage import ancestry
    from posttrain.artifacts.store import Store
    from posttrain.planning.past import Past

    if rules:
        ruleview.show_rules(files or (), as_json)
        return
    if what is None:
        raise SpecError(
            "say what to explain",
            where="posttrain explain",
            expected="a stage, the start of a digest, an alias, or the code of a rule",
            fix="`posttrain explain --rules` lists the rules",
        )
    store = Store(workspace.absolute())
    if what not in Past.of(store).newest() and ruleview.names_rule(what, files or ()):
        ruleview.show_rule(what, files or (), as_json)
        return
    try:
        digests = artifacts_named(store, what)
    except (SpecError, StoreError) as error:
        if what.isidentifier():
            note = f"a finding that ends with `[{what}]` and no code is what a stage says of its own options and data"
            error.fix = "; ".join(filter(None, (error.fix, f"{note}: what to do stands below it")))
        raise
    trees = [ancestry(store, digest) for digest in dict.fromkeys(digests.values())]
    if as_json:
        print_json([tree.as_dict() for tree in trees])
        return
    for tree in trees:
        for line in tree.lines():
            say(line)


def diff(
    left: Annotated[
        str, typer.Argument(metavar="A", help="A run, a stage, NAME@ALIAS, or the start of a digest.")
    ],
    right: Annotated[str, typer.Argument(metavar="B", help="The same kind of thing.")],
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show the first differences between two runs or two artifacts; exit 1 when there are any."""
    from posttrain.artifacts.store import Store

    lines = _differences(Store(workspace.absolute()), left, right)
    if as_json:
        print_json(lines)
    else:
        for line in lines or ["no difference"]:
            say(line)
    if lines:
        raise typer.Exit(1)


def _differences(store: Store, left: str, right: str) -> list[str]:
    from posttrain.planning.comparison import compare_artifacts, compare_records

    runs = records_of_run(store, left), records_of_run(store, right)
    if runs[0] is not None and runs[1] is not None:
        return compare_records(runs[0], runs[1])
    if runs[0] is not None or runs[1] is not None:
        raise SpecError(
            "a run can only be compared with a run",
            where="posttrain diff",
            found=f"{left} and {right}",
            expected="two runs, two stages or two artifacts",
        )
    ours, theirs = (artifacts_named(store, name, "a run, ") for name in (left, right))
    if len(ours) == len(theirs) == 1:
        ours, theirs = {"": next(iter(ours.values()))}, {"": next(iter(theirs.values()))}
    lines = []
    for port in dict.fromkeys([*ours, *theirs]):
        if port not in ours or port not in theirs:
            lines.append(f"{port}: only in {'the first' if port in ours else 'the second'}")
            continue
        found = compare_artifacts(store, store.get(ours[port]), store.get(theirs[port]))
        lines.extend(f"{port}: {line}" if port else line for line in found)
    return lines


def _show_runs(states: Sequence[RunState]) -> None:
    from posttrain.cli.planview import table_of
    from posttrain.execution.resumption import suggested

    if not states:
        say("no runs yet: `posttrain run quickstart` starts one")
        return
    table = table_of("run", "pipeline", "status", "runner", "started", "stages")
    for state in states:
        done = sum(node.status.passes for node in state.nodes.values())
        table.add_row(
            state.record.run, printable(state.pipeline), state.status, state.runner,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.started)), f"{done}/{len(state.nodes)}",
        )  # fmt: skip
    console().print(table)
    warn([f"run {state.record.run}: {state.damage}" for state in states if state.damage is not None])
    if (unfinished := suggested(states)) is not None:
        say(f"go on with `posttrain resume {unfinished.run}`")


def _show_nodes(state: RunState) -> None:
    from posttrain.cli.measures import duration, figures
    from posttrain.cli.reportview import BROKEN

    for node in state.nodes.values():
        ended = node.ended
        spent = "" if ended is None else duration(ended.seconds)
        broken = node.status in BROKEN
        told = "" if ended is None or broken else figures(ended.figures) or ended.summary
        say(f"  {node.node:<24} {node.status.value:<12} {spent:>8}  {told}".rstrip())
        if ended is not None and broken and ended.error:
            say(f"      {ended.error.get('message')}")


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
        "damage": None if state.damage is None else state.damage.as_dict(),
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
    from posttrain.execution.processes import alive

    found = []
    for path in sorted((workspace / "services").glob("*.json")):
        try:
            service = json.loads(path.read_text())
            running = alive(int(service["pid"]), float(service["started"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                "this service record is damaged", where=str(path), found=error, fix="remove it"
            ) from error
        if running:
            found.append({key: service.get(key) for key in ("name", "url", "pid", "started")})
    return found
