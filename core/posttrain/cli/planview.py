"""The plan and the cached run, for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from posttrain.cli.findingview import show_findings
from posttrain.cli.measures import amount, figures
from posttrain.cli.output import console, printable, say
from posttrain.contracts.stage import Estimate
from posttrain.planning.plan import NodePlan, Plan, Standing
from posttrain.wording import size

_COLOURS = {
    Standing.CACHED: "green",
    Standing.NEW: "cyan",
    Standing.STALE: "yellow",
    Standing.WAITS: "yellow",
    Standing.BLOCKED: "magenta",
}


_WHOLE = frozenset({"run", "artifact"})
"""Columns whose words are copied into other commands."""
GAP = 2
"""Blanks between two columns."""


def show_plan(plan: Plan) -> None:
    """Print every node with its standing, its reasons, its plugins and what it will need."""
    table = table_of("stage", "uses", "standing", "why", "estimate")
    for node in plan.nodes.values():
        table.add_row(
            printable(node.node),
            printable("\n".join(_plugins(node))),
            Text(node.standing.value, style=_COLOURS[node.standing]),
            printable("; ".join(node.reasons)),
            "" if node.estimate is None else printable(_estimate(node.estimate)),
        )
    console().print(Text(f"plan of {printable(plan.name)}", style="bold"))
    console().print(table)
    show_findings(finding for node in plan.nodes.values() for finding in node.findings)
    _show_drift(plan)
    for command in dict.fromkeys(" ".join(node.launch) for node in plan.nodes.values()):
        console().print(f"\nstage process: {printable(command)}", style="dim", soft_wrap=True)
    if plan.unbuilt:
        say(f"\nnot in the cache, though --from needs it: {', '.join(plan.unbuilt)}")
    elif plan.refused:
        say("\nthis will not run: see the errors above")
    elif plan.nothing_to_do:
        say("\nnothing to do: everything is cached")


def show_cached(plan: Plan, *, quiet: bool) -> None:
    """Print a fully cached pipeline."""
    table = table_of("stage", "status", "key figures", "artifact")
    for node in plan.nodes.values():
        record = node.record
        if record is None:
            reasons = printable("; ".join(node.reasons))
            table.add_row(printable(node.node), Text("skipped", style="magenta"), reasons, "")
            continue
        status, style = ("cached", "green") if record.status == "completed" else (record.status, "magenta")
        told = printable(figures(record.figures) or record.summary)
        artifacts = "\n".join(
            plan.outputs[reference].artifact.ref  # type: ignore[union-attr]
            for reference in plan.outputs
            if reference.node == node.node
        )
        table.add_row(printable(node.node), Text(status, style=style), told, artifacts)
    if not quiet:
        console().print(table)
    for node in plan.nodes.values():
        if node.record is not None and node.record.status != "completed":
            show_verdict(node.node, node.record.summary)
    say("nothing to do")


def show_verdict(node: str, summary: str) -> None:
    """Print why a gate did not let pass."""
    line = Text(f"\n{printable(node)}: ", style="bold magenta")
    line.append(printable(summary), style="default not bold")
    console().print(line)


def table_of(*headings: str, whole: Collection[str] = _WHOLE) -> Table:
    """Return a table without lines that folds long words rather than cutting them.

    Args:
        headings: Of its columns.
        whole: Those of columns that are not folded.
    """
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in whole)
    return table


def _plugins(node: NodePlan) -> Iterable[str]:
    """Yield the stage and each component with what identifies its code."""
    for option, identity in node.plugins.items():
        stage = option == node.uses
        yield f"{'' if stage else '+ '}{identity['name']} {_version(identity)}"
    for option, name in node.means.items():
        yield f"{option.removeprefix('with.')}: {name} (in no key)"


def _version(identity: Mapping[str, Any]) -> str:
    if "file" in identity:
        return f"file {identity['file'][:8]}"
    own = f"v{identity['numerics']}"
    if "distribution" not in identity:
        return own
    source = f", source {identity['source'][:8]}" if "source" in identity else ""
    return f"{own} of {identity['distribution']} {identity['version']}{source}"


def _estimate(estimate: Estimate) -> str:
    parts = []
    if estimate.parameters is not None:
        parts.append(f"{amount(estimate.parameters)} parameters")
    if estimate.trainable is not None and estimate.trainable != estimate.parameters:
        parts.append(f"{amount(estimate.trainable)} trained")
    if estimate.memory_bytes is not None:
        parts.append(size(estimate.memory_bytes))
    if estimate.note:
        parts.append(estimate.note)
    return ", ".join(parts)


def _show_drift(plan: Plan) -> None:
    drifted = dict.fromkeys(change for node in plan.nodes.values() for change in node.drift)
    if drifted:
        text = f"\nversions have changed since cached outputs were made: {', '.join(drifted)}"
        console().print(Text(text, style="yellow"))
