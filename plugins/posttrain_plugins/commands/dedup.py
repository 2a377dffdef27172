"""`posttrain data dedup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.sources import (
    Columns,
    Data,
    FormatName,
    Overwrite,
    PluginFiles,
    dataset,
    options,
    require_free,
    write_jsonl,
)


def dedup(
    data: Data,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where the rows go that are left.")
    ] = None,
    on: Annotated[str, typer.Option(metavar="row|prompt|COLUMN", help="What is compared.")] = "row",
    exact: Annotated[bool, typer.Option("--exact", help="Find equal rows only.")] = False,
    verbatim: Annotated[bool, typer.Option("--verbatim", help="Case and white space count.")] = False,
    threshold: Annotated[float, typer.Option(help="Least Jaccard similarity of near copies.")] = 0.8,
    shingles: Annotated[
        str, typer.Option(metavar="words|characters", help="What shingles are of.")
    ] = "words",
    size: Annotated[int, typer.Option(help="Length of a shingle.")] = 5,
    permutations: Annotated[int, typer.Option(help="Hash functions of a MinHash.")] = 128,
    seed: Annotated[int, typer.Option(help="Which hash functions.")] = 0,
    clusters: Annotated[
        Path | None, typer.Option("--clusters", metavar="FILE", help="Where every cluster is written.")
    ] = None,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Find equal and nearly equal rows, and write the rest to a file if `--output` names one."""
    from posttrain_plugins.data.dedup import DedupConfig, cluster_lines, find, report_of

    compared = {"on": on, "near": not exact, "normalize": not verbatim}
    hashed = {"threshold": threshold, "shingles": shingles, "size": size, "permutations": permutations}
    config = options(DedupConfig, {**compared, **hashed, "seed": seed}, "posttrain data dedup")
    require_free([path for path in (output, clusters) if path is not None], overwrite)
    with reserved(as_json):
        rows = dataset(data, workspace.absolute(), format, columns=columns, files=files)
        found = find(rows.read, rows.format, config)
        report = report_of(found, rows.read, rows.format, config)
        if output is not None:
            write_jsonl(output, found.kept(rows.read()))
        if clusters is not None:
            write_jsonl(clusters, cluster_lines(found.clusters))
    if as_json:
        names = {"data": rows.name, "output": None if output is None else str(output)}
        print_json({**names, "notes": list(rows.notes), **report})
    else:
        for note in rows.notes:
            say(note)
        _show(found.summary(), report, output)


def _show(summary: str, report: dict[str, Any], output: Path | None) -> None:
    for example in report["examples"]:
        say(f"{example['size']} alike: row {example['kept']['row']} is kept: {example['kept']['text']}")
        for copy in example["copies"]:
            say(f"    row {copy['row']}: {copy['text']}")
    say(summary)
    if output is not None:
        say(f"written to {output}")
