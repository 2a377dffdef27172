"""`posttrain data split`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say, warn
from posttrain.errors import SpecError
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


def split(
    data: Data,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where the parts go.")],
    test: Annotated[
        float | None, typer.Option(help="The share of the part `test`, such as 0.05.", show_default=False)
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="NAME=SHARE", help="A part with another name; may be repeated."),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="prompt|row|COLUMN", help="What stays together in one part.")
    ] = "prompt",
    salt: Annotated[
        str | None,
        typer.Option(help="Any text; needed to split once more what a split has chosen.", show_default=False),
    ] = None,
    format: FormatName = None,
    columns: Columns = None,
    plugins: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Split rows by their content: neither their order nor new rows move one from part to part.

    Writes DIR/train.jsonl and a file for each part. Unless split by row or by a column, no prompt is in two parts.
    """
    from posttrain_plugins.data.split import DataSplitConfig, deal, shared_prompts
    from posttrain_plugins.data.splits import split_names

    config = options(DataSplitConfig, _given(test, part or [], by, salt), "posttrain data split")
    files = {name: output / f"{name}.jsonl" for name in split_names(config.split)}
    require_free(files.values(), overwrite)
    with reserved(as_json):
        rows = dataset(data, workspace.absolute(), format, columns=columns, files=plugins)
        dealt = deal(rows.read, config, rows.format, rows.name)
        for name, file in files.items():
            write_jsonl(file, dealt.rows(name, rows.read()))
    if as_json:
        counts = dealt.counts()
        parts = {name: {"file": str(file), "rows": counts[name]} for name, file in files.items()}
        about = {"format": rows.format, "notes": list(rows.notes)}
        print_json({**about, "parts": parts, "shared_prompts": dealt.shared})
        return
    for note in rows.notes:
        say(note)
    for name, count in dealt.counts().items():
        say(f"{count:>8} rows  {files[name]}")
    warn([shared_prompts(dealt)] if dealt.shared else [])


def _given(test: float | None, parts: list[str], by: str, salt: str | None) -> dict[str, Any]:
    split = dict(map(_share, parts)) if test is None else {"test": test, **dict(map(_share, parts))}
    grouped = {} if by in ("prompt", "row") else {"split_by": "group", "split_column": by}
    return {"split": split, "split_by": by, "split_salt": salt, **grouped}


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError as error:
        raise SpecError(
            "a part needs a name and a share", where="--part", found=text, expected="such as dev=0.02"
        ) from error
