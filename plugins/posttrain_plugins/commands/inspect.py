"""`posttrain data inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import DEFAULT_WORKSPACE, Json, Workspace, console, print_json, reserved, say
from posttrain.errors import SpecError
from posttrain_plugins.commands.sources import (
    Columns,
    Data,
    Dataset,
    FormatName,
    Overwrite,
    PluginFiles,
    dataset,
    options,
    require_free,
)

if TYPE_CHECKING:
    from posttrain_plugins.inspection.finding import Found
    from posttrain_plugins.inspection.models import Model
    from posttrain_plugins.inspection.views import Inspection

VERB = "posttrain data inspect"
_FEW, _MANY = 3, 50
"""Rows that are shown in a terminal, and on a page, unless they are named."""
_MOST = 10_000
"""Rows that one range may name."""
_PAGES = (".html", ".htm")
_ROWS = re.compile(r"(\d+)(?:-(\d+))?")


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A model directory, the start of a digest, NODE, PIPELINE:NODE or NAME@ALIAS.",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--row", metavar="N|N-M", help="A row to show, or several, from 1; may be repeated."),
]
TrainerName = Annotated[
    str | None,
    typer.Option(help="Whose view of the rows; unset: the first trainer that takes their format."),
]
MaxLength = Annotated[int | None, typer.Option(help="As the trainer's option; unset: the model's.")]
Truncation = Annotated[str | None, typer.Option(help="As the trainer's option.")]
Others = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME=VALUE", help="Another option of the trainer; may be repeated."),
]
Tokens = Annotated[bool, typer.Option("--tokens", help="Show where tokens end.")]
Page = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead of printing.")
]
First = Annotated[
    int | None, typer.Option("--first", min=1, help="Look at this many rows only, the first ones.")
]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="Another chat template than the model's: of the library, or a file."
    ),
]


def inspect(
    data: Data,
    model: ModelName,
    row: Rows = None,
    trainer: TrainerName = None,
    max_length: MaxLength = None,
    truncation: Truncation = None,
    with_: Others = None,
    tokens: Tokens = False,
    html: Page = None,
    first: First = None,
    template: Template = None,
    format: FormatName = None,
    columns: Columns = None,
    files: PluginFiles = None,
    overwrite: Overwrite = False,
    workspace: Workspace = DEFAULT_WORKSPACE,
    as_json: Json = False,
) -> None:
    """Show what training gets to see: the text of rows, which tokens are learned, what is lost on the way.

    Begins with a summary of the whole dataset. Rows are prepared by the code that training prepares them with.
    """
    from posttrain_plugins.inspection.models import open_model

    _require_page(html, overwrite)
    given, store = {"max_length": max_length, "truncation": truncation}, workspace.absolute()
    chosen = {name: value for name, value in given.items() if value is not None} | _options(with_ or [])
    wanted = _wanted(row or [], _FEW if html is None else _MANY)
    with reserved(as_json):
        opened = open_model(model, store, template)
        tokenized = tokenized_dataset(data, store)
        if tokenized is not None:
            looked = look_at_tokens(tokenized, data, opened, trainer, chosen, wanted, files or ())
        else:
            rows = dataset(data, store, format, columns=columns, files=files)
            trouble = not row and html is not None
            looked = look(
                rows, opened, trainer, chosen, wanted=wanted, trouble=trouble, first=first, files=files or ()
            )
        _require_shown(row or [], wanted, looked)
        if html is not None:
            _write(html, looked)
    _tell(looked, html, tokens, as_json)


def _tell(looked: Inspection, html: Path | None, tokens: bool, as_json: bool) -> None:
    """Print an inspection, or where it was written."""
    if as_json:
        print_json(looked.as_dict())
    elif html is not None:
        say(f"{len(looked.shown)} of {looked.rows} rows shown on {html}")
    else:
        from posttrain_plugins.inspection.terminal import show

        show(looked, console(), tokens=tokens)


def look(
    rows: Dataset,
    model: Model,
    trainer: str | None,
    chosen: Mapping[str, Any],
    *,
    wanted: Iterable[int] = (),
    trouble: bool = False,
    first: int | None = None,
    files: Sequence[Path] = (),
) -> Inspection:
    """Look at a dataset.

    Args:
        rows: The dataset.
        model: The model.
        trainer: Whose view; None for the first trainer that takes the format.
        chosen: Options of the trainer.
        wanted: Indices of the rows to show.
        trouble: Whether to show the first row too that is left out for each reason.
        first: Look at this many rows only.
        files: Local plugin files that may hold the trainer.
    """
    from posttrain_plugins.inspection.gathering import Subject, inspect
    from posttrain_plugins.inspection.trainers import form_of, needs_of, preparation, takes

    name, plugin = takes(rows.format, trainer, files)
    form = rows.form or form_of(rows.format)
    config: Any = options(plugin.config, chosen, VERB) if plugin is not None else None
    needs = frozenset() if plugin is None else needs_of(plugin, config, files)
    directory = None if rows.artifact is None else rows.artifact.path
    prepared = preparation(plugin, config, form, model, directory, needs)

    def read() -> Iterable[Mapping[str, Any]]:
        return rows.read() if plugin is None else plugin.rows(rows.read(), form, needs, config.seed)

    subject = Subject(rows.title, rows.format, form, read, rows.place, first)
    return inspect(subject, model, prepared, name, frozenset(wanted), examples_of_trouble=trouble)


def tokenized_dataset(data: str, workspace: Path) -> Found | None:
    """Return the dataset of the store that a name means, where its rows are tokens; None otherwise."""
    from posttrain.artifacts.kinds import Kind
    from posttrain_plugins.data.tokens.token_rows import FORMATS
    from posttrain_plugins.inspection.finding import found

    if Path(data).exists():
        return None
    given = found(data, workspace, frozenset({Kind.DATASET}))
    return given if given.artifact.facts.format in FORMATS else None


def look_at_tokens(
    given: Found,
    data: str,
    model: Model,
    trainer: str | None,
    chosen: Mapping[str, Any],
    wanted: Iterable[int] = (),
    files: Sequence[Path] = (),
) -> Inspection:
    """Look at a tokenized dataset; as `look` otherwise."""
    from posttrain_plugins.inspection.tokenized import Fit, inspect_tokens
    from posttrain_plugins.inspection.trainers import takes

    artifact = given.artifact
    name, plugin = takes(str(artifact.facts.format), trainer, files)
    config: Any = options(plugin.config, chosen, VERB) if plugin is not None else None
    limit = model.context if config is None else config.max_length or model.context
    fit = Fit(name, limit, "keep_start" if config is None else config.truncation)
    title = data if given.origin is None else f"{data} ({given.origin})"
    return inspect_tokens(artifact, title, model, fit, frozenset(wanted))


def _wanted(texts: Iterable[str], few: int) -> set[int]:
    """Return the indices of the rows to show."""
    wanted: set[int] = set()
    for text in texts:
        found = _ROWS.fullmatch(text)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high < low + _MOST:
            expected = f"a number from 1, or at most {_MOST} such as 5-9"
            raise SpecError("this names no rows", where="--row", found=text, expected=expected)
        wanted.update(range(low - 1, high))
    return wanted or set(range(few))


def _require_shown(named: Iterable[str], wanted: set[int], looked: Inspection) -> None:
    """Refuse when no row that was named is there."""
    if any(named) and not any(row.number - 1 in wanted for row in looked.shown):
        raise SpecError(
            "there is no such row", where="--row", found=", ".join(named), expected=f"rows 1 to {looked.rows}"
        )


def _require_page(path: Path | None, overwrite: bool) -> None:
    """Refuse to write a page over something else, such as the data, and over another page unasked."""
    if path is None:
        return
    if path.suffix.lower() not in _PAGES:
        raise SpecError(
            "a page needs a name that ends so", where="--html", found=str(path), expected=" or ".join(_PAGES)
        )
    require_free([path], overwrite)


def _options(texts: Iterable[str]) -> dict[str, Any]:
    from posttrain.planning.tree import resolve_plain

    given = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise SpecError("an option needs a value", where="--with", found=text, expected="NAME=VALUE")
        try:
            given[name] = resolve_plain(value)
        except ValueError as error:
            raise SpecError(str(error), where="--with", found=text) from error
    return given


def _write(path: Path, looked: Inspection) -> None:
    from posttrain.artifacts.files import guarded
    from posttrain_plugins.inspection.page import page

    with guarded(path, "write the page"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(looked), encoding="utf-8")
