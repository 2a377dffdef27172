"""`posttrain data statistics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, reserved
from posttrain_plugins.commands.inspect import look, look_at_tokens, tokenized_dataset
from posttrain_plugins.commands.sources import Columns, Data, Dataset, FormatName, PluginFiles, dataset

if TYPE_CHECKING:
    from pathlib import Path

    from posttrain_plugins.inspection.statistics import Statistics
    from posttrain_plugins.inspection.views import ModelView


def statistics(
    data: Data,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model, for tokens too; as `posttrain data inspect` takes it."),
    ] = None,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show what a dataset is like: lengths, turns, duplicates and its longest rows.

    With a model also tokens, and the share of them that is learned, of the rows that training takes.
    """
    with reserved(as_json):
        opened = partial(dataset, data, workspace.absolute(), format, columns=columns, files=files)
        found, looked = _found(data, model, workspace.absolute(), opened, files or ())
    if as_json:
        print_json(found.as_dict() if looked is None else {**found.as_dict(), "model": asdict(looked)})
        return
    from posttrain_plugins.inspection.terminal import show_model, show_statistics

    show_statistics(found, console())
    if looked is not None:
        show_model(looked, console())


def _found(
    data: str, model: str | None, workspace: Path, rows: Callable[[], Dataset], files: Sequence[Path]
) -> tuple[Statistics, ModelView | None]:
    from posttrain_plugins.inspection.models import open_model

    if model is None:
        return _counted(rows()), None
    opened = open_model(model, workspace)
    tokenized = tokenized_dataset(data, workspace)
    if tokenized is not None:
        looked = look_at_tokens(tokenized, data, opened, None, {})
    else:
        looked = look(rows(), opened, None, {}, files=files)
    return looked.statistics, looked.model


def _counted(rows: Dataset) -> Statistics:
    from posttrain_plugins.inspection.statistics import Census
    from posttrain_plugins.inspection.trainers import form_of

    census, form = Census(rows.format), rows.form or form_of(rows.format)
    for row in rows.read():
        census.add(row, form.passages(row))
    return census.statistics()
