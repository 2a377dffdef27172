"""An inspection in a terminal. Text of the data never reaches it unescaped, nor is it read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain_plugins.data.formats.values import counted
from posttrain_plugins.inspection.bars import text_bars
from posttrain_plugins.inspection.escaping import one_line
from posttrain_plugins.inspection.painting import MARKS, STYLES, UNKNOWN, paint, safe
from posttrain_plugins.inspection.statistics import Statistics
from posttrain_plugins.inspection.summary import (
    Line,
    charts,
    model_lines,
    statistics_lines,
    training_lines,
)
from posttrain_plugins.inspection.views import Inspection, Look, ModelView, Piece, Remark, RowView, Side

_INDENT = (0, 0, 0, 2)
_TONES: Mapping[str, str] = {"good": "green", "bad": "bold red", "warn": "yellow", "plain": ""}


def show(inspection: Inspection, console: Console, *, tokens: bool = False) -> None:
    """Print an inspection.

    Args:
        inspection: What to print.
        console: Where to; without colours, marks take their place.
        tokens: Whether to show where tokens end.
    """
    _title(console, f"{inspection.source} · {inspection.format} · {inspection.model.label}")
    _lines(console, training_lines(inspection))
    show_model(inspection.model, console)
    show_statistics(inspection.statistics, console)
    if inspection.shown:
        _legend(console, tokens)
    for row in inspection.shown:
        show_row(row, console, tokens=tokens)


def show_model(model: ModelView, console: Console) -> None:
    """Print what of a model decides how rows are read."""
    _title(console, "model")
    _lines(console, model_lines(model))


def show_statistics(statistics: Statistics, console: Console) -> None:
    """Print the statistics of a dataset, with histograms."""
    _title(console, "dataset")
    _lines(console, statistics_lines(statistics))
    for title, spread in charts(statistics):
        console.print(Text(f"{title}", "bold"))
        for bar in text_bars(spread.bins):
            console.print(Text(f"  {bar}", "cyan"), soft_wrap=True)


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(safe(text, "bold"), soft_wrap=True)


def _lines(console: Console, lines: Iterable[Line]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(line.name, safe(line.text, _TONES[line.tone]))
    console.print(Padding(table, _INDENT))


def _legend(console: Console, tokens: bool) -> None:
    legend = Text("\nshown as ", "dim")
    plain = _marks(console)
    for look, name in (
        (Look.LEARNED, "learned"),
        (Look.GIVEN, "given"),
        (Look.STRADDLING, "half prompt, half answer: not learned"),
        (Look.CUT, "cut by truncation"),
    ):
        before, after = MARKS[look] if plain else ("", "")
        legend.append(f"{before}{name}{after}", STYLES[look])
        legend.append("  ")
    if tokens:
        legend.append(UNKNOWN, "bold red").append(" behind a token that the tokenizer does not know")
    console.print(legend)


def show_row(row: RowView, console: Console, *, tokens: bool = False) -> None:
    """Print one row: what it says, its sequences, and what there is to know about them."""
    _title(console, f"── row {row.number}" + (f" · {row.place}" if row.place != f"row {row.number}" else ""))
    if row.dropped is not None:
        console.print(safe(f"left out of training: {row.dropped}", "bold red"), soft_wrap=True)
    _said(console, row)
    if row.common:
        console.print(Text(f"\nshared by all sides · {row.common} tokens", "bold"))
        console.print(_painted(console, row.sides[0].pieces[: row.common], tokens), soft_wrap=True)
    for side in row.sides:
        _side(console, side, row.common, tokens)


def _said(console: Console, row: RowView) -> None:
    """Print the row as it is: its tools, messages and other columns."""
    if row.tools:
        console.print(Text("tools", "bold"))
    for tool in row.tools:
        console.print(Text(f"  {one_line(tool)}", "dim"), soft_wrap=True)
    for part, turns in groupby(row.turns, attrgetter("part")):
        console.print(Text(part, "bold"))
        for turn in turns:
            said = Text("  ").append(one_line(turn.role), "cyan").append("  ")
            console.print(said.append_text(safe(turn.content)), soft_wrap=True)
            for name, value in turn.fields.items():
                field = Text("    ").append(f"{one_line(name)}: ", "cyan")
                console.print(field.append_text(safe(value)), soft_wrap=True)
    for name, value in row.others.items():
        console.print(Text(f"  {one_line(name)}: {one_line(value)}", "dim"), soft_wrap=True)


def _side(console: Console, side: Side, common: int, tokens: bool) -> None:
    counts = side.counts
    told = f"{counts['tokens']} tokens, {counts['supervised']} learned"
    told += f", {counted(side.images, 'image')}" if side.images else ""
    for name in ("straddling", "cut"):
        told += f", {counts[name]} {name}" if counts[name] else ""
    console.print(Text(f"\n{side.role} · {told}", "bold"))
    console.print(_painted(console, side.pieces[common:], tokens), soft_wrap=True)
    for remark in side.remarks:
        console.print(_remark(remark), soft_wrap=True)


def _remark(remark: Remark) -> Text:
    where = "" if remark.turn is None else f" (message {remark.turn + 1})"
    text = Text(f"  ! {remark.code}{where}: ", "yellow").append_text(safe(remark.message))
    if remark.fix:
        text.append("\n    fix: ", "dim").append_text(safe(remark.fix, "dim"))
    return text


def _painted(console: Console, pieces: Sequence[Piece], tokens: bool) -> Text:
    return paint(pieces, tokens=tokens, marks=_marks(console))


def _marks(console: Console) -> bool:
    return console.color_system is None or console.no_color
