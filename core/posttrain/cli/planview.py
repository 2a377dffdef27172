"""The plan and the cached run, for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from posttrain.cli.output import console, printable, say
from posttrain.contracts.stage import Finding, Level
from posttrain.planning.plan import NodePlan, Plan, Standing

_COLOURS = {
    Standing.CACHED: "green",
    Standing.NEW: "cyan",
    Standing.STALE: "yellow",
    Standing.WAITS: "yellow",
    Standing.BLOCKED: "magenta",
}
_LEVELS = {Level.ERROR: "red", Level.WARNING: "yellow", Level.NOTE: "dim"}


def show_plan(plan: Plan) -> None:
    """Print every node with its standing, its reasons, its plugins and what it will need."""
    table = Table(title=f"plan of {plan.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("stage", "uses", "standing", "why", "estimate"):
        table.add_column(heading, overflow="fold")
    for node in plan.nodes.values():
        table.add_row(
            printable(node.node),
            _uses(node),
            Text(node.standing.value, style=_COLOURS[node.standing]),
            printable("; ".join(node.reasons)),
            _estimate(node),
        )
    console().print(table)
    _show_findings(finding for node in plan.nodes.values() for finding in node.findings)
    _show_drift(plan)
    commands = dict.fromkeys(" ".join(node.launch) for node in plan.nodes.values())
    for command in commands:
        console().print(f"\nstage process: {command}", style="dim", markup=False, soft_wrap=True)
    if plan.nothing_to_do:
        say("\nnothing to do: everything is cached")


def show_cached(plan: Plan, *, quiet: bool) -> None:
    """Print a fully cached pipeline."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("stage", "status", "key figures", "artifact"):
        table.add_column(heading, overflow="fold")
    for node in plan.nodes.values():
        record = node.record
        if record is None:
            table.add_row(node.node, Text("skipped", style="magenta"), "; ".join(node.reasons), "")
            continue
        status = "cached" if record.status == "completed" else record.status
        artifacts = ", ".join(digest[:12] for digest in record.outputs.values())
        table.add_row(node.node, Text(status, style="green"), figures(record.figures), artifacts)
    if not quiet:
        console().print(table)
    say("nothing to do")


def figures(values: object) -> str:
    """Return key figures in one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in dict(values).items())  # type: ignore[call-overload]


def _uses(node: NodePlan) -> str:
    identity = node.plugins[node.uses]
    version = identity.get("version") or identity.get("numerics") or str(identity.get("file", ""))[:8]
    return f"{node.uses} ({identity.get('distribution', 'numerics')} {version})"


def _estimate(node: NodePlan) -> str:
    if node.estimate is None:
        return ""
    parts = []
    if node.estimate.parameters is not None:
        parts.append(f"{_short(node.estimate.parameters)} parameters")
    if node.estimate.trainable is not None and node.estimate.trainable != node.estimate.parameters:
        parts.append(f"{_short(node.estimate.trainable)} trained")
    if node.estimate.memory_bytes is not None:
        parts.append(f"{node.estimate.memory_bytes / 2**30:.2f} GiB")
    if node.estimate.note:
        parts.append(node.estimate.note)
    return ", ".join(parts)


def _short(number: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _show_findings(findings: Iterable[Finding]) -> None:
    found = list(findings)
    if found:
        console().print("\nhand-offs", style="bold")
    for finding in found:
        at = f"{finding.node}.{finding.port}" if finding.port else finding.node
        line = Text(f"  {finding.level.value:<8}", style=_LEVELS[finding.level])
        line.append(f"{finding.certainty.value:<10}", style="dim")
        line.append(printable(f"{at}: {finding.message} [{finding.rule}]"))
        console().print(line)
        if finding.fix:
            console().print(Text(f"                    fix: {printable(finding.fix)}", style="dim"))


def _show_drift(plan: Plan) -> None:
    drifted = dict.fromkeys(change for node in plan.nodes.values() for change in node.drift)
    if drifted:
        console().print(
            Text(
                f"\nversions have changed since cached outputs were made: {', '.join(drifted)}",
                style="yellow",
            )
        )
