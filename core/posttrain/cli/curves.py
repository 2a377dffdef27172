"""The verb `curves`: how the metrics of a training went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, printable, say
from posttrain.errors import SpecError

SPARK, HEIGHT, WIDEST = 32, 12, 100
NARROWEST = 8
"""Blocks of a curve below which the least and the most give way to it."""


def curves(
    what: Annotated[
        str,
        typer.Argument(
            metavar="STAGE", help="A stage in the newest run that came to it; RUN:STAGE or PIPELINE:STAGE."
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", help="A metric to plot; may be repeated.", show_default=False),
    ] = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Draw how the metrics of a training went, step by step: all in a line each, or some as plots."""
    from posttrain.artifacts.store import Store
    from posttrain.execution.metrics import course_of

    course = course_of(what, Store(workspace.absolute()))
    found = course.curves
    chosen = {name: found[name] for name in _known(metric, found)} if metric else found
    if as_json:
        points = {name: [list(point) for point in curve.items()] for name, curve in chosen.items()}
        print_json({"run": course.run, "stage": course.node, "metrics": points})
        return
    say(f"{course.node} in run {course.run}")
    if metric:
        _plot(chosen)
    else:
        _list(found)


def _known(metric: list[str], found: dict[str, dict[int, float]]) -> list[str]:
    from posttrain.wording import did_you_mean, listed

    for name in metric:
        if name not in found:
            raise SpecError(
                "the stage told no such metric",
                where="--metric",
                found=name,
                expected=f"one of {listed(found)}",
                fix=did_you_mean(name, list(found)),
            )
    return list(dict.fromkeys(metric))


def _plot(chosen: dict[str, dict[int, float]]) -> None:
    from posttrain.cli.chart import plot

    width = min(console().width, WIDEST)
    for name, points in chosen.items():
        say()
        say(name)
        for line in plot(points, width, HEIGHT):
            say(line)


def _list(found: dict[str, dict[int, float]]) -> None:
    from posttrain.cli.chart import sparkline
    from posttrain.cli.planview import table_of

    headings, rows = ["metric", "steps", "first", "last", "least", "most"], []
    for name, points in found.items():
        values = list(points.values())
        numbers = (values[0], values[-1], min(values), max(values))
        rows.append([printable(name), str(len(points)), *(f"{each:.4g}" for each in numbers)])
    if _room(headings, rows) < NARROWEST:
        headings, rows = headings[:4], [row[:4] for row in rows]
    width = max(1, min(SPARK, _room(headings, rows)))
    columns = [*headings, "curve"]
    table = table_of(*columns, whole=columns)
    for row, points in zip(rows, found.values(), strict=True):
        table.add_row(*row, sparkline(points, width))
    console().print(table)


def _room(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how many characters of a line are left beside some columns."""
    from posttrain.cli.planview import GAP

    widths = (max(map(len, column)) + GAP for column in zip(headings, *rows, strict=True))
    return console().width - sum(widths) - GAP
