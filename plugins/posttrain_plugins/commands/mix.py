"""`posttrain data mix`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say
from posttrain_plugins.commands.sources import (
    Columns,
    Dataset,
    FormatName,
    Overwrite,
    PluginFiles,
    datasets,
    options,
    require_free,
    write_jsonl,
)

if TYPE_CHECKING:
    from posttrain_plugins.data.row_file import RowFile


Sources = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Files or datasets of the store, two or more.")
]
Output = Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the rows go.")]
Weights = Annotated[
    list[float] | None,
    typer.Option("--weight", help="The share of each dataset, in their order; every row without."),
]
Rows = Annotated[int | None, typer.Option(help="So many rows.", show_default=False)]
Stop = Annotated[
    str, typer.Option(metavar="first_exhausted|all_exhausted", help="How many rows else, with weights.")
]
Repeat = Annotated[
    bool, typer.Option("--repeat", help="Use rows again once all of a dataset have been used.")
]
SourceColumn = Annotated[
    str | None, typer.Option(help="A column to add that names each row's dataset.", show_default=False)
]
Names = Annotated[
    list[str] | None, typer.Option("--name", help="What each dataset is called, in their order.")
]
Seed = Annotated[int, typer.Option(help="Which rows, and in which order.")]


def mix(
    data: Sources,
    output: Output,
    weights: Weights = None,
    rows: Rows = None,
    stop: Stop = "first_exhausted",
    repeat: Repeat = False,
    source_column: SourceColumn = None,
    names: Names = None,
    seed: Seed = 0,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Take rows of several datasets in exact shares, shuffle them and write them as JSON Lines.

    A column that `--columns` names is renamed in the files that have it.
    """
    from posttrain_plugins.data.mix import MixConfig, chosen, mixture, require_alike

    given = {"rows": rows, "stop": stop, "repeat": repeat, "source_column": source_column, "seed": seed}
    lists = {"weights": tuple(weights or ()), "names": tuple(names or ())}
    config = options(MixConfig, {**given, **lists}, "posttrain data mix")
    require_free([output], overwrite)
    with reserved(as_json):
        found = datasets(data, workspace.absolute(), format, columns=columns, files=files)
        sources = [found[each] for each in data]
        require_alike(config, [each.format for each in sources])
        called = config.names or tuple(data)
        with _opened(sources) as opened:
            counts, order = chosen(config, opened, called)
            write_jsonl(output, mixture(opened, order, config.source_column, called))
    if as_json:
        print_json({**_report(sources, called, counts), "output": str(output)})
    else:
        _show(sources, called, counts)
        say(f"written to {output}")


def _report(sources: Sequence[Dataset], called: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    taken = [{"data": name, "rows": count} for name, count in zip(called, counts, strict=True)]
    notes = [note for each in sources for note in each.notes]
    return {"format": sources[0].format, "rows": sum(counts), "taken": taken, "notes": notes}


def _show(sources: Sequence[Dataset], called: Sequence[str], counts: Sequence[int]) -> None:
    from posttrain_plugins.data.mix import told

    for each in sources:
        for note in each.notes:
            say(f"{each.name}: {note}")
    say(told(counts, called))


@contextmanager
def _opened(sources: Sequence[Dataset]) -> Iterator[list[RowFile]]:
    """Open rows by their number; those of files are written beside each other as a store holds them."""
    from posttrain_plugins.data.row_file import RowFile
    from posttrain_plugins.data.rows import ROWS

    with ExitStack() as stack:
        beside = Path(stack.enter_context(TemporaryDirectory(prefix="posttrain-mix-")))
        opened = []
        for number, source in enumerate(sources):
            directory = beside / str(number) if source.artifact is None else source.artifact.path
            if source.artifact is None:
                write_jsonl(directory / ROWS, source.read())
            opened.append(stack.enter_context(closing(RowFile(directory))))
        yield opened
