"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from posttrain.artifacts.store import Store
from posttrain.cli.measures import duration, figures
from posttrain.cli.output import AS_WRITTEN, Voice, console, printable, say
from posttrain.cli.planview import show_verdict, table_of
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
JUDGED = (NodeStatus.REJECTED, NodeStatus.INCONCLUSIVE)
"""Verdicts, whose reasons are told below the table."""
BROKEN = (NodeStatus.FAILED, NodeStatus.INTERRUPTED)
"""Ends whose text is shown below the table, as an error with all its parts."""
_REPEATED = 10
"""How many warnings are repeated below the table."""


def show_report(
    report: RunReport, workspace: Path, warnings: Sequence[str] = (), voice: Voice = AS_WRITTEN
) -> None:
    """Print stage, time, key figures and artifacts of a run, what was warned of, what went wrong, how to go on."""
    store = Store(workspace)
    table = table_of("stage", "status", "time", "key figures", "artifact")
    for result in report.results.values():
        table.add_row(
            printable(result.node),
            Text(result.status.value, style=_COLOURS.get(result.status, "")),
            "" if result.status in (NodeStatus.CACHED, NodeStatus.SKIPPED) else duration(result.seconds),
            printable(told(result)),
            "\n".join(store.get(digest).ref for digest in result.outputs.values()),
        )
    console().print()
    console().print(table)
    _show_warnings(warnings, voice)
    for result in report.results.values():
        if result.status in BROKEN:
            _show_error(result, voice)
        elif result.status in JUDGED:
            show_verdict(result.node, result.summary)
    say(f"run {report.run}: {report.status}" + _go_on(report, voice))


def told(result: NodeResult) -> str:
    """Return what a node has to say for itself in one line."""
    return "" if result.status in BROKEN else figures(result.figures) or result.summary


def _show_warnings(warnings: Sequence[str], voice: Voice) -> None:
    """Repeat what scrolled away while the run went on."""
    if not warnings:
        return
    console().print(Text(f"\n{len(warnings)} warning{'s' * (len(warnings) > 1)}", style="bold yellow"))
    for text in warnings[:_REPEATED]:
        console().print(Text(f"  warning: {printable(voice.word(text))}"), soft_wrap=True)
    if len(warnings) > _REPEATED:
        say(f"  and {len(warnings) - _REPEATED} more above")


def _go_on(report: RunReport, voice: Voice) -> str:
    if report.to_mend:
        return f" (mend what is named above, then {voice.again}; what is done is reused)"
    if report.status in ("failed", "interrupted"):
        return f" (go on with {voice.word(f'`posttrain resume {report.run}`')})"
    return ""


def _show_error(result: NodeResult, voice: Voice) -> None:
    error = result.error or {"message": result.summary}
    line = Text(f"\n{printable(result.node)}: ", style="bold red")
    line.append(printable(voice.word(str(error.get("message", "")))), style="default not bold")
    console().print(line)
    for part in ("where", "found", "expected", "fix"):
        if error.get(part):
            told = (voice.place if part == "where" else voice.word)(str(error[part]))
            console().print(Text(f"  {part}: {printable(told)}"), soft_wrap=True)
    for text in str(error.get("log") or "").splitlines():
        console().print(Text(f"  log: {printable(text)}"), soft_wrap=True)
