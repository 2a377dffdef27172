"""The live view of a run: one line per stage with progress, loss, speed and time left.

Where standard output is not a terminal, one plain line is printed for each thing that happens.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.cli.measures import duration, figures
from posttrain.cli.output import AS_WRITTEN, Voice, console, printable, say
from posttrain.contracts.stage import Level

_PLAIN_EVERY = 10.0
"""Seconds between two progress lines of a stage without a terminal."""


class View(Protocol):
    """Something that shows a run's events.

    Attributes:
        warnings: What was warned of so far, each thing once, for the end of the run.
    """

    warnings: list[str]

    def observe(self, event: dict[str, Any]) -> None:
        """Take one journal entry or stage event; called from several threads."""


@contextmanager
def view(nodes: Sequence[str], *, quiet: bool, voice: Voice = AS_WRITTEN) -> Iterator[View]:
    """Show a run while the block lasts, in the way that fits where the output goes."""
    if quiet:
        yield Silent()
    elif sys.stdout.isatty():
        live = LiveView(nodes, voice)
        with live.shown():
            yield live
    else:
        yield PlainView(voice)


class Silent:
    """Shows nothing."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def observe(self, event: dict[str, Any]) -> None:
        """Keep warnings alone."""
        heed(event, self.warnings)


def heed(event: Mapping[str, Any], warnings: list[str]) -> None:
    """Keep what an event warns of."""
    if event["type"] == "note" and _warns(event) and (told := _said(event)) not in warnings:
        warnings.append(told)


@dataclass
class Line:
    """What is known of one node."""

    node: str
    status: str = "pending"
    began: float = 0.0
    seconds: float = 0.0
    done: int = 0
    total: int | None = None
    unit: str = "steps"
    first_done: int | None = None
    first_time: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Update the line from an event."""
        _TAKERS.get(str(event["type"]), _ignore)(self, event)

    def left(self) -> float | None:
        """Estimate the seconds left from the speed since the first progress seen."""
        if self.total is None or self.first_done is None or self.done <= self.first_done:
            return None
        return (time.time() - self.first_time) / (self.done - self.first_done) * (self.total - self.done)


def _ignore(line: Line, event: Mapping[str, Any]) -> None:
    """Take nothing from an event that is not about progress."""


def _started(line: Line, event: Mapping[str, Any]) -> None:
    line.status, line.began, line.first_done = "running", time.time(), None


def _ended(line: Line, event: Mapping[str, Any]) -> None:
    line.status, line.seconds, line.figures = event["status"], event["seconds"], event["figures"]


def _progressed(line: Line, event: Mapping[str, Any]) -> None:
    line.done, line.total, line.unit = event["done"], event["total"], event["unit"]
    if line.first_done is None:
        line.first_done, line.first_time = line.done, time.time()


def _measured(line: Line, event: Mapping[str, Any]) -> None:
    line.values = {**line.values, **event["values"]}


_TAKERS = {"node-started": _started, "node-ended": _ended, "progress": _progressed, "metrics": _measured}


class PlainView:
    """Plain lines, for logs and pipes."""

    def __init__(self, voice: Voice = AS_WRITTEN) -> None:
        self._voice = voice
        self._lines: dict[str, Line] = {}
        self._told: dict[str, float] = {}
        self.warnings: list[str] = []
        self._lock = threading.Lock()

    def observe(self, event: dict[str, Any]) -> None:
        """Print what happened, progress at most every ten seconds."""
        with self._lock:
            heed(event, self.warnings)
            if event["type"] == "note":
                say(self._voice.word(_note(event)))
            node = event.get("node")
            if node:
                line = self._lines.setdefault(node, Line(node))
                line.take(event)
                self._tell(line, event)

    def _tell(self, line: Line, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "node-started":
            say(f"{line.node}: started ({event['uses']})")
            self._told[line.node] = time.time()
        elif kind == "node-ended":
            # The text of a failure stands below the table at the end.
            told = "" if line.status in _BROKEN else figures(line.figures) or event["summary"]
            say(f"{line.node}: {line.status} in {duration(line.seconds)}  {told}".rstrip())
        elif kind == "progress" and time.time() - self._told.get(line.node, 0.0) > _PLAIN_EVERY:
            say(f"{line.node}: {line.done}/{line.total or '?'} {line.unit}  {_gauges(line)}".rstrip())
            self._told[line.node] = time.time()


class LiveView:
    """A table that is redrawn in place; notes scroll above it."""

    def __init__(self, nodes: Sequence[str], voice: Voice = AS_WRITTEN) -> None:
        self._voice = voice
        self._lines = {node: Line(node) for node in nodes}
        self.warnings: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the table on the screen while the block lasts."""
        from rich.live import Live

        with Live(console=console(), get_renderable=self.table, refresh_per_second=5, transient=True):
            yield

    def observe(self, event: dict[str, Any]) -> None:
        """Update the table; print notes above it."""
        with self._lock:
            heed(event, self.warnings)
            node = event.get("node")
            if node:
                self._lines.setdefault(node, Line(node)).take(event)
        if event["type"] == "note":
            told = printable(self._voice.word(_note(event)))
            console().print(told, style="yellow" if _warns(event) else "dim")

    def table(self) -> Any:
        """Return the table as it stands."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        with self._lock:
            for line in self._lines.values():
                running = line.status == "running"
                bar = (
                    ProgressBar(line.total, line.done, width=24, pulse=line.total is None) if running else ""
                )
                spent = time.time() - line.began if running else line.seconds
                table.add_row(
                    Text(printable(line.node)),
                    Text(line.status, style=_COLOURS.get(line.status, "")),
                    bar,
                    "" if line.status == "pending" else duration(spent),
                    Text(printable(_gauges(line) if running else figures(line.figures))),
                )
        return table


def _note(event: Mapping[str, Any]) -> str:
    return f"{'warning' if _warns(event) else 'note'}: {_said(event)}"


def _said(event: Mapping[str, Any]) -> str:
    at = f"{event['node']}: " if event.get("node") else ""
    return f"{at}{event['message']}"


def _warns(event: Mapping[str, Any]) -> bool:
    return Level(event.get("level", Level.NOTE)) is not Level.NOTE


_BROKEN = ("failed", "interrupted")
_COLOURS = {"pending": "dim", "running": "cyan", "completed": "green", "cached": "green", "failed": "red"}


def _gauges(line: Line) -> str:
    """Return loss, speed and time left of a running stage."""
    parts = []
    if "loss" in line.values:
        parts.append(f"loss {line.values['loss']:.4g}")
    if "tokens_per_second" in line.values:
        parts.append(f"{line.values['tokens_per_second']:.0f} tokens/s")
    left = line.left()
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)
