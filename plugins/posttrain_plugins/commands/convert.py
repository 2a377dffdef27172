"""`posttrain data convert`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.sources import (
    Columns,
    Data,
    Dataset,
    FormatName,
    Overwrite,
    PluginFiles,
    Row,
    dataset,
    options,
    require_free,
    write_jsonl,
)


def convert(
    data: Data,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="The format that the rows are to have.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the rows go.")],
    every_answer: Annotated[
        bool, typer.Option("--every-answer", help="A row for every answer of a conversation, not the last.")
    ] = False,
    turns: Annotated[bool, typer.Option("--turns", help="Make messages of strings.")] = False,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Leave out rows that do not suit their format, or the new one."),
    ] = False,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Turn rows into those of another format and write them as JSON Lines.

    Other columns travel along, but for those by which the file would be taken for one of yet another format.
    """
    from posttrain_plugins.data.convert import ConvertConfig, converted, told, way

    given = {"to": to, "every_answer": every_answer, "turns": turns, "skip_invalid": skip_invalid}
    config = options(ConvertConfig, given, "posttrain data convert")
    require_free([output], overwrite)
    counts: Counter[str] = Counter()
    left: Counter[str] = Counter()
    with reserved(as_json):
        rows = dataset(
            data, workspace.absolute(), format, columns=columns, files=files, skip_invalid=skip_invalid
        )
        path = way(rows.format, config)
        made = converted(rows.read(), path, config, counts)
        write_jsonl(output, _recognisable(made, to, left))
    if as_json:
        names = {"data": rows.name, "from": rows.format, "to": to, "output": str(output)}
        print_json({**names, **_read(rows, counts), **counts, "dropped_columns": dict(left)})
    else:
        for line in (*rows.notes, told(counts, path), *map(_dropped, left.items())):
            say(line)
        say(f"written to {output}")


def _recognisable(rows: Iterable[Row], format: str, left: Counter[str]) -> Iterator[Row]:
    """Leave out columns by which rows would be taken for those of another format, and count them."""
    from posttrain_plugins.data.formats import BUILT_IN
    from posttrain_plugins.data.formats.inference import misleading

    for row in rows:
        gone = misleading(BUILT_IN, row, format)
        left.update(gone)
        yield {name: value for name, value in row.items() if name not in gone}


def _read(rows: Dataset, counts: Counter[str]) -> dict[str, object]:
    """Return how many rows there were before any was left out, and why they were."""
    return {
        "read": rows.counts.get("read", counts["rows"]),
        "unsuited": rows.counts.get("unsuited", 0),
        "silent": rows.counts.get("silent", 0),
        "notes": list(rows.notes),
    }


def _dropped(item: tuple[str, int]) -> str:
    from posttrain_plugins.data.formats.values import counted

    rows = counted(item[1], "row")
    return f"the column `{item[0]}` was left out of {rows}: with it they would be taken for another format"
