"""`posttrain data convert`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.sources import (
    Data,
    FormatName,
    Overwrite,
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
        bool, typer.Option("--skip-invalid", help="Leave out rows that would not suit the format.")
    ] = False,
    format: FormatName = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Turn rows into those of another format and write them as JSON Lines."""
    from posttrain_plugins.data.convert import ConvertConfig, converted, told, way

    given = {"to": to, "every_answer": every_answer, "turns": turns, "skip_invalid": skip_invalid}
    config = options(ConvertConfig, given, "posttrain data convert")
    require_free([output], overwrite)
    counts: Counter[str] = Counter()
    with reserved(as_json):
        rows = dataset(data, workspace.absolute(), format)
        path = way(rows.format, config)
        write_jsonl(output, converted(rows.read(), path, config, counts))
    if as_json:
        print_json({"data": rows.name, "from": rows.format, "to": to, "output": str(output), **counts})
    else:
        say(told(counts, path))
        say(f"written to {output}")
