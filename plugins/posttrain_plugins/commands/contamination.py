"""`posttrain data contamination`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, print_json, reserved, say, warn
from posttrain.errors import DataError, SpecError
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
    from posttrain_plugins.commands.exposed import Exposed
    from posttrain_plugins.data.similarity.exposure import Exposure, RowSet

_VERB = "posttrain data contamination"
_SHOWN = 10

Files = Annotated[list[str] | None, typer.Option(metavar="DATA", help="A dataset; may be repeated.")]
Hits = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Where every hit is written.")]
Clean = Annotated[
    Path | None,
    typer.Option("--clean", metavar="FILE", help="Where the training rows go that overlap none."),
]


def contamination(
    pipeline: Annotated[
        str | None, typer.Argument(metavar="PIPELINE", help="A pipeline file or a recipe.")
    ] = None,
    train: Files = None,
    evaluation: Files = None,
    ngram: Annotated[int, typer.Option(help="Consecutive words in common.")] = 13,
    coverage: Annotated[float, typer.Option(help="Least share of a row's words in such runs.")] = 0.0,
    shortest: Annotated[int, typer.Option(help="Words below which a row has to be all that is asked.")] = 5,
    common: Annotated[int, typer.Option(help="Rows that may share a run before it is a template.")] = 10,
    on: Annotated[str, typer.Option(metavar="prompt|row|COLUMN", help="What is looked for.")] = "prompt",
    most: Annotated[
        float | None, typer.Option("--max", help="Exit with 1 when more of any evaluation set is found.")
    ] = None,
    hits: Hits = None,
    clean: Clean = None,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Look for the rows of every evaluation set in every training set, of a pipeline or of files.

    `--ngram 8 --coverage 0.5` looks as Tulu 3 did, the default as GPT-3 did. Exits with 1 when `--max` is exceeded.
    `--format`, `--columns` and `--file` are about the files that `--train` and `--evaluation` name.
    """
    from posttrain_plugins.data.contamination import ContaminationConfig, hits_of, report_of, summary

    given = {"ngram": ngram, "coverage": coverage, "shortest": min(shortest, ngram), "on": on}
    config = options(ContaminationConfig, {**given, "common": common, "max_share": most}, _VERB)
    require_free([path for path in (hits, clean) if path is not None], overwrite)
    opened = partial(datasets, workspace=workspace.absolute(), format=format, columns=columns, files=files)
    with reserved(as_json), _sets(pipeline, train or [], evaluation or [], workspace, opened) as sets:
        _require(sets, most)
        found = _compared(sets, config)
        if hits is not None:
            write_jsonl(hits, hits_of(found))
        if clean is not None:
            _write_clean(clean, sets.training, found)
        shown = list(hits_of(found))
    if as_json:
        print_json({**report_of(found, config), "unread": list(sets.unread), "hits": shown})
    else:
        _show(sets, shown, summary(found, most))
    if most is not None and found.worst > most:
        raise typer.Exit(1)


@contextmanager
def _sets(
    pipeline: str | None,
    train: Sequence[str],
    evaluation: Sequence[str],
    workspace: Path,
    opened: Callable[[Sequence[str]], Mapping[str, Dataset]],
) -> Iterator[Exposed]:
    """Open the datasets of a pipeline, and those that are named besides."""
    from posttrain_plugins.commands.exposed import Exposed, exposed

    found = opened([*train, *evaluation])
    training, judged = ([found[each] for each in dict.fromkeys(names)] for names in (train, evaluation))
    named = Exposed(tuple(training), tuple(judged), ())
    if pipeline is None:
        yield named
        return
    from posttrain.pipeline import Pipeline

    with exposed(Pipeline.find(pipeline), workspace.absolute()) as own:
        yield Exposed((*own.training, *named.training), (*own.evaluation, *named.evaluation), own.unread)


def _require(sets: Exposed, most: float | None) -> None:
    """Refuse to compare nothing, and to call clean what was not read.

    Raises:
        SpecError: There is no training or no evaluation set.
        DataError: With a limit, not every dataset can be read.
    """
    for name, given in (("training", sets.training), ("evaluation", sets.evaluation)):
        if not given:
            raise SpecError(
                f"there is no {name} set to compare",
                where=_VERB,
                found=f"not made yet: {', '.join(sets.unread)}" if sets.unread else None,
                fix="give a pipeline that trains and evaluates, or `--train` and `--evaluation`",
            )
    if most is not None and sets.unread:
        raise DataError(
            "some datasets cannot be compared yet, so that `--max` cannot be judged",
            where=_VERB,
            found=", ".join(sets.unread),
            fix="run the pipeline up to them first, with `posttrain run PIPELINE --only STAGE`",
        )


def _compared(sets: Exposed, config: Any) -> Exposure:
    from posttrain_plugins.data.similarity.exposure import exposures

    return exposures(
        [_rows(each) for each in sets.training], [_rows(each) for each in sets.evaluation], config.measure()
    )


def _rows(given: Dataset) -> RowSet:
    from posttrain_plugins.data.similarity.exposure import RowSet

    return RowSet(given.name, given.format, given.read, given.name)


def _write_clean(path: Path, training: Sequence[Dataset], found: Exposure) -> None:
    if len(training) != 1:
        raise SpecError(
            "`--clean` needs a single training set",
            where=_VERB,
            found=", ".join(each.name for each in training),
            fix="name it with `--train`",
        )
    gone = found.overlapping[0]
    write_jsonl(path, (row for place, row in enumerate(training[0].read()) if place not in gone))


def _show(sets: Exposed, hits: Sequence[dict[str, Any]], summary: str) -> None:
    for hit in hits[:_SHOWN]:
        say(
            f"{hit['evaluation']} row {hit['row']} is in {hit['dataset']} row {hit['training_row']}: "
            f"{hit['longest']} words, {hit['coverage']:.0%}: {hit['text']}"
        )
    if len(hits) > _SHOWN:
        say(f"and {len(hits) - _SHOWN} more; `--output FILE` writes all")
    say(f"compared {', '.join(each.name for each in sets.training)}")
    say(summary)
    warn([f"not compared, since it is not made yet: {name}" for name in sets.unread])
