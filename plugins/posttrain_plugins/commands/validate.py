"""`posttrain data validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.sources import Data, FormatName, Overwrite, dataset, options, require_free

if TYPE_CHECKING:
    from posttrain_plugins.data.judging.validation import Report
    from posttrain_plugins.data.validate import ValidateConfig


def validate(
    data: Data,
    format: FormatName = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CHECK", help="Leave a check out; may be repeated."),
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
        "refuse": "warning" if strict else "error",
    }
    config = options(ValidateConfig, given, "posttrain data validate")
    require_free([] if output is None else [output], overwrite)
    with reserved(as_json):
        report = _report(data, workspace.absolute(), format, config)
    if output is not None:
        output.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"data": data, **report.as_dict()})
    else:
        _show(data, report)
    if refused(report, config):
        raise typer.Exit(1)


def _report(text: str, workspace: Path, format: str | None, config: ValidateConfig) -> Report:
    from posttrain_plugins.data.formats import format_of
    from posttrain_plugins.data.judging.validation import inspect, inspect_file
    from posttrain_plugins.data.validate import checks_of

    if Path(text).exists():
        return inspect_file(Path(text), format, checks_of(config))
    rows = dataset(text, workspace, format)
    entries = ((f"row {number}", row) for number, row in enumerate(rows.read(), 1))
    return inspect(entries, format_of(rows.format), rows.format, checks_of(config))


def _show(data: str, report: Report) -> None:
    for problem in report.problems:
        say(f"{problem.level.value:<8}{problem.code}: {problem.count} rows: {problem.title}")
        for place, found in problem.examples:
            say(f"            {place}: {found}")
        if problem.fix:
            say(f"            fix: {problem.fix}")
    say(f"{data}: {report.summary()}")
