"""`posttrain data validate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.artifacts.files import guarded
from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.progress import Watched
from posttrain_plugins.commands.sources import (
    Columns,
    Data,
    FormatName,
    Overwrite,
    PluginFiles,
    dataset,
    format_given,
    options,
    renamed,
    require_free,
)
from posttrain_plugins.commands.wording import worded

if TYPE_CHECKING:
    from posttrain_plugins.data.judging.validation import Report
    from posttrain_plugins.data.validate import ValidateConfig


def validate(
    data: Data,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CHECK", help="Leave a check out; may be repeated."),
    ] = None,
    weight_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The rows' weights; a column `weight` if there."),
    ] = None,
    max_characters: Annotated[int, typer.Option(help="Characters of a row that is not too long.")] = 200_000,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings make the exit code 1 too.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the report as JSON.")
    ] = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Look at every row and tell all that is wrong or odd. The exit code is 1 where there are errors."""
    from posttrain_plugins.data.validate import ValidateConfig, refused

    given = {
        "ignore": tuple(ignore or ()),
        "max_characters": max_characters,
        "weight_column": weight_column,
        "refuse": "warning" if strict else "error",
    }
    config = options(ValidateConfig, given, "posttrain data validate")
    require_free([] if output is None else [output], overwrite)
    with reserved(as_json):
        if Path(data).exists():
            report = _of_file(Path(data), format, columns or (), files or (), config)
        else:
            report = _of_store(data, workspace.absolute(), format, columns or (), config)
    if output is not None:
        with guarded(output, "write the report"):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"data": data, **report.as_dict()})
    else:
        _show(data, report)
    if refused(report, config):
        raise typer.Exit(1)


def _of_file(
    path: Path, format: str | None, columns: Sequence[str], files: Sequence[Path], config: ValidateConfig
) -> Report:
    from posttrain_plugins.data.judging.preparing import Prepared
    from posttrain_plugins.data.judging.validation import inspect_file
    from posttrain_plugins.data.validate import checks_of

    names = renamed(columns)
    report = inspect_file(
        path,
        format,
        checks_of(config),
        format_given(format, files),
        lambda file: Prepared(Watched(file), names),
    )
    for problem in report.problems:
        problem.fix = None if problem.fix is None else worded(problem.fix)
        problem.examples = [(place, worded(found)) for place, found in problem.examples]
    return report


def _of_store(
    text: str, workspace: Path, format: str | None, columns: Sequence[str], config: ValidateConfig
) -> Report:
    from posttrain_plugins.data.formats import format_of
    from posttrain_plugins.data.judging.validation import inspect
    from posttrain_plugins.data.validate import checks_of

    rows = dataset(text, workspace, format, columns=columns)
    entries = ((f"row {number}", row) for number, row in enumerate(rows.read(), 1))
    return inspect(entries, format_of(rows.format), rows.format, checks_of(config))


def _show(data: str, report: Report) -> None:
    from posttrain_plugins.data.formats.values import counted

    for problem in report.problems:
        say(f"{problem.level.value:<8}{problem.code}: {counted(problem.count, 'row')}: {problem.title}")
        for place, found in problem.examples:
            say(f"            {place}: {found}")
        if problem.fix:
            say(f"            fix: {problem.fix}")
    say(f"{data}: {report.summary()}")
