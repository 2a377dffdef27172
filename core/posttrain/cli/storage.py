"""The `posttrain store` verbs: ls, verify, gc."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, printable, say
from posttrain.errors import ExitCode
from posttrain.wording import size

app = typer.Typer(no_args_is_help=True, help="The artifact store.", rich_markup_mode=None)


@app.command()
def ls(workspace: Workspace = DEFAULT_WORKSPACE, as_json: Json = False) -> None:
    """List the artifacts with kind, size and the stage that made them first."""
    from posttrain.artifacts.store import Store
    from posttrain.cli.planview import table_of

    store = Store(workspace.absolute())
    rows = []
    for artifact in store.artifacts():
        made = store.provenance(artifact.digest)
        rows.append(
            {
                "digest": artifact.digest,
                "kind": artifact.kind.value,
                "bytes": artifact.manifest.size,
                "node": made.node if made else None,
                "run": made.run if made else None,
                "created": made.created if made else None,
            }
        )
    rows.sort(key=lambda row: str(row["created"]))
    if as_json:
        print_json(rows)
        return
    table = table_of("artifact", "size", "stage", "run", "made")
    for row in rows:
        ref = f"{row['kind']}:{str(row['digest'])[:12]}"
        table.add_row(
            ref,
            size(int(str(row["bytes"]))),
            *(printable(str(row[k] or "")) for k in ("node", "run", "created")),
        )
    console().print(table)


@app.command()
def verify(
    full: Annotated[bool, typer.Option("--full", help="Hash every file, whatever the memo says.")] = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Check every artifact against its digest; exit 1 when one is damaged."""
    from posttrain.artifacts.store import Store

    store = Store(workspace.absolute())
    problems = {digest: store.verify(digest, full) for digest in store.digests()}
    damaged = {digest: found for digest, found in problems.items() if found}
    if as_json:
        print_json({"artifacts": len(problems), "damaged": damaged})
    else:
        for found in damaged.values():
            for problem in found:
                say(problem)
        say(f"{len(problems)} artifacts, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(int(ExitCode.FAILED))


@app.command()
def gc(
    delete: Annotated[
        bool, typer.Option("--delete", help="Really remove; without it only say what would go.")
    ] = False,
    drop_run: Annotated[
        list[str] | None, typer.Option("--drop-run", metavar="RUN", help="Forget this ended run first.")
    ] = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Remove what no run, no alias and no resumable run refers to."""
    from posttrain.artifacts.gc import collect

    report = collect(workspace.absolute(), dry_run=not delete, drop_runs=drop_run or ())
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    verb = "would remove" if report.dry_run else "removed"
    for part in (report.runs, report.objects, report.keys, report.work, report.scratch):
        for item in part:
            say(f"{verb} {item.name} ({size(item.bytes)})")
    for note in report.notes:
        say(f"note: {note}")
    say(f"{verb} {size(report.bytes)}; {report.kept} artifacts stay")
    if report.dry_run and report.bytes:
        say("add --delete to do it")
