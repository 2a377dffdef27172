"""What a command of `posttrain data` reads and writes: files, and datasets of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from posttrain.artifacts.files import guarded
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import StageConfig
from posttrain.errors import DataError, PluginError, SpecError
from posttrain_plugins.commands.progress import Watched
from posttrain_plugins.commands.wording import spoken

if TYPE_CHECKING:
    from posttrain.contracts.format import Format
    from posttrain_plugins.inspection.finding import Found

Row = dict[str, Any]
Options = TypeVar("Options", bound=StageConfig)

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A file that `data.load` reads, NODE.PORT as last run, RUN:NODE.PORT, PIPELINE:NODE.PORT, "
        "or the start of a digest.",
    ),
]
FormatName = Annotated[
    str | None, typer.Option("--format", help="The rows' format, where it cannot be told from the columns.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="OLD=NEW", help="Rename a column of a file; may be repeated."),
]
PluginFiles = Annotated[
    list[Path] | None,
    typer.Option("--file", help="A local plugin file whose formats and trainers count too; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")]


@dataclass(frozen=True)
class Dataset:
    """Rows that a command was given.

    Args:
        name: How messages call them.
        format: Their format.
        read: Begins to read the rows anew.
        artifact: Where they are in the store, if they are.
        standing: Reads where each row stands in its file, such as `line 7`; None where rows are numbered.
        form: The format itself, where it is no built-in one.
        origin: The pipeline and the run that a name of the store meant.
        counts: Of a file, rows that were `read`, and of them `unsuited` and `silent` ones, which gave no row.
        notes: What became of the rows of a file on the way to these.
    """

    name: str
    format: str
    read: Callable[[], Iterator[Row]]
    artifact: Artifact | None = None
    standing: Callable[[], Sequence[str]] | None = None
    form: Format | None = None
    origin: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name, with the run that it meant."""
        return self.name if self.origin is None else f"{self.name} ({self.origin})"

    @cached_property
    def _places(self) -> Sequence[str]:
        return () if self.standing is None else self.standing()

    def place(self, index: int) -> str:
        """Say where a row stands, given by its index."""
        return self._places[index] if self.standing is not None else f"row {index + 1}"


def dataset(
    text: str,
    workspace: Path,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    files: Sequence[Path] | None = None,
    skip_invalid: bool = False,
) -> Dataset:
    """Open what a command was given: a file, or a dataset of the store.

    Args:
        text: How it is named.
        workspace: The `.posttrain` directory.
        format: The format's name; None recognises a built-in one.
        columns: Columns of a file to rename, each as `OLD=NEW`.
        files: Local plugin files that may hold the format.
        skip_invalid: Leave out rows of a file that do not suit the format instead of refusing all.

    Raises:
        DataError: The file cannot be read, or its rows cannot be used.
        SpecError: A column to rename is malformed, or the dataset is no file.
        StoreError: There is neither a file nor a dataset of that name.
    """
    names = renamed(columns or ())
    if Path(text).exists():
        with spoken():
            return _file(Path(text), format, names, files or (), skip_invalid)
    if names:
        raise SpecError("columns of a file alone can be renamed", where="--columns", found=text)
    given = _stored(text, workspace)
    artifact = given.artifact
    if format not in (None, artifact.facts.format):
        raise DataError(
            "this dataset has another format",
            where=text,
            found=str(artifact.facts.format),
            expected=str(format),
            fix="leave `--format` out; `posttrain data convert` makes other formats",
        )
    return replace(stored(artifact, text), origin=given.origin)


def datasets(
    texts: Iterable[str],
    workspace: Path,
    format: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    files: Sequence[Path] | None = None,
) -> dict[str, Dataset]:
    """Open several datasets, each of them once, by how they are named; a column is renamed in the files that have it.

    Args:
        texts: How they are named.
        workspace: The `.posttrain` directory.
        format: The format of the files' rows; None recognises a built-in one in each.
        columns: Columns of files to rename, each as `OLD=NEW`.
        files: Local plugin files that may hold the format.

    Raises:
        SpecError: A column to rename is malformed, or no file has it.
        PosttrainError: As `dataset`.
    """
    names = renamed(columns or ())
    given = {text: _columns(Path(text), names) for text in dict.fromkeys(texts)}
    missing = [name for name in names if not any(name in own for own in given.values())]
    if missing:
        raise SpecError(
            "no file has this column",
            where="--columns",
            found=missing[0],
            expected=f"a column of {' or '.join(given)}",
        )
    return {
        text: dataset(
            text,
            workspace,
            format if Path(text).exists() else None,
            columns=[f"{old}={names[old]}" for old in own],
            files=files,
        )
        for text, own in given.items()
    }


def _columns(path: Path, names: Iterable[str]) -> list[str]:
    """Return which of some columns rows of a file have; none of what is no file. It reads until it has seen all."""
    wanted, found = set(names), set[str]()
    if not wanted or not path.exists():
        return []
    from posttrain_plugins.data.reading.files import open_file

    for _, row in open_file(path).entries():
        found |= wanted & row.keys()
        if found == wanted:
            break
    return sorted(found)


def renamed(texts: Iterable[str]) -> dict[str, str]:
    """Return new names of columns by their old ones.

    Raises:
        SpecError: A text is not `OLD=NEW`.
    """
    names = {}
    for text in texts:
        old, _, new = text.partition("=")
        if not old or not new:
            raise SpecError(
                "a column needs its old and its new name",
                where="--columns",
                found=text,
                expected="OLD=NEW, such as question=prompt",
            )
        names[old] = new
    return names


def format_given(name: str | None, files: Sequence[Path]) -> Format | None:
    """Return a format that is no built-in one, from a plugin; None for a built-in one or none.

    Raises:
        PluginError: There is no such format.
    """
    from posttrain_plugins.data.formats import BUILT_IN

    if name is None or name in BUILT_IN:
        return None
    from posttrain.contracts.registration import Group
    from posttrain.registry.discovery import discover
    from posttrain_plugins.data.formats import meant

    try:
        form: Format = discover(files).make(Group.FORMAT, name)
    except PluginError as error:
        error.fix = meant(name, tuple(BUILT_IN)) or error.fix
        raise
    return form


def stored(artifact: Artifact, name: str) -> Dataset:
    """Return a dataset of the store.

    Raises:
        DataError: The artifact holds no rows.
    """
    from posttrain_plugins.data.rows import ROWS, stream_rows

    if artifact.kind is not Kind.DATASET or not artifact.file(ROWS).exists():
        raise DataError(
            "this artifact holds no rows",
            where=name,
            found=f"{artifact.kind} with {', '.join(entry.path for entry in artifact.manifest.files[:3])}",
            expected=f"a dataset with {ROWS}",
        )
    return Dataset(name, str(artifact.facts.format), lambda: stream_rows(artifact), artifact)


def options(model: type[Options], given: Mapping[str, Any], verb: str) -> Options:
    """Return a stage's options as a command was given them.

    Raises:
        SpecError: They are not possible.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise SpecError(
            "; ".join(map(_problem, error.errors())), where=verb, fix=f"see `{verb} --help`"
        ) from error


def _problem(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    place = ".".join(map(str, error["loc"]))
    return f"{place}: {message}" if place else message


def require_free(paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse to write over what is there.

    Raises:
        DataError: One of the files exists.
    """
    there = [] if overwrite else [str(path) for path in paths if path.exists()]
    if there:
        raise DataError(
            "the output is there already",
            found=", ".join(there),
            fix="write somewhere else, or add `--overwrite`",
        )


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON Lines, whole or not at all, and return how many there are."""
    from posttrain_plugins.data.rows import encode_row

    count = 0
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with guarded(path, "write the output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                for count, row in enumerate(rows, 1):
                    file.write(encode_row(row, f"row {count}") + b"\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return count


def _file(
    path: Path, format: str | None, columns: Mapping[str, str], files: Sequence[Path], skip_invalid: bool
) -> Dataset:
    from posttrain_plugins.data.judging.cleaning import clean
    from posttrain_plugins.data.reading.files import open_file

    form = format_given(format, files)
    cleaned = clean(
        Watched(open_file(path)),
        format=format,
        columns=columns,
        drop_duplicates=False,
        limit=None,
        given=form,
        skip_invalid=skip_invalid,
    )

    def places() -> list[str]:
        return [place for place, _ in cleaned.entries()]

    return Dataset(
        str(path),
        cleaned.format,
        cleaned.read,
        standing=places,
        form=form if cleaned.format == format else None,
        counts=cleaned.counts,
        notes=cleaned.notes,
    )


def _stored(text: str, workspace: Path) -> Found:
    from posttrain_plugins.inspection.finding import found

    return found(text, workspace, frozenset({Kind.DATASET}))
