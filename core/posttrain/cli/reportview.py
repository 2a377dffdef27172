"""The table at the end of a run."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from posttrain.artifacts.store import Store
from posttrain.cli.output import console, printable, say
from posttrain.cli.planview import figures
from posttrain.contracts.runner import NodeResult, NodeStatus
from posttrain.execution.session import RunReport

_COLOURS = {
    NodeStatus.CACHED: "green",
    NodeStatus.COMPLETED: "green",
    NodeStatus.REJECTED: "magenta",
    NodeStatus.INCONCLUSIVE: "magenta",
    NodeStatus.SKIPPED: "dim",
    NodeStatus.FAILED: "red",
    NodeStatus.INTERRUPTED: "yellow",
}


def show_report(report: RunReport, workspace: Path) -> None:
    """Print stage, time, key figures and artifacts of a run, then what went wrong and how to go on."""
    store = Store(workspace)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("stage", "status", "time", "key figures", "artifact"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "time" else "left")
    for result in report.results.values():
        table.add_row(
            printable(result.node),
            Text(result.status.value, style=_COLOURS.get(result.status, "")),
            "" if result.status in (NodeStatus.CACHED, NodeStatus.SKIPPED) else duration(result.seconds),
            printable(figures(result.figures) or result.summary),
            "\n".join(store.get(digest).ref for digest in result.outputs.values()),
        )
    console().print()
    console().print(table)
    for result in report.results.values():
        if result.status in (NodeStatus.FAILED, NodeStatus.INTERRUPTED):
            _show_error(result)
    say(f"run {report.run}: {report.status}" + _go_on(report))


def _go_on(report: RunReport) -> str:
    return (
        f" (go on with `posttrain resume {report.run}`)" if report.status in ("failed", "interrupted") else ""
    )


def _show_error(result: NodeResult) -> None:
    error = result.error or {"message": result.summary}
    line = Text(f"\n{result.node}: ", style="bold red")
    line.append(printable(str(error.get("message", ""))), style="default not bold")
    console().print(line)
    for part in ("where", "found", "expected", "fix", "log"):
        if error.get(part):
            console().print(Text(f"  {part}: {printable(str(error[part]))}"))


def duration(seconds: float) -> str:
    """Return a time span as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
