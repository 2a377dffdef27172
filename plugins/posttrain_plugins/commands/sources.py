"""What a command of `posttrain data` reads and writes: files, and datasets of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from posttrain.artifacts.files import guarded
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import StageConfig
from posttrain.errors import DataError, SpecError

Row = dict[str, Any]
Options = TypeVar("Options", bound=StageConfig)

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A file that `data.load` reads, NODE.PORT as last built, RUN:NODE.PORT, or the start of a digest.",
    ),
]
FormatName = Annotated[
    str | None, typer.Option("--format", help="The rows' format, where it cannot be told from the columns.")
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
        places: Where each row stands in its file, such as `line 7`; none where rows are numbered.
    """

    name: str
    format: str
    read: Callable[[], Iterator[Row]]
    artifact: Artifact | None = None
    places: Sequence[str] = ()

    def place(self, index: int) -> str:
        """Say where a row stands, given by its index."""
        return self.places[index] if self.places else f"row {index + 1}"


def dataset(text: str, workspace: Path, format: str | None = None) -> Dataset:
    """Open what a command was given: a file, or a dataset of the store.

    Raises:
        DataError: The file cannot be read, or its rows cannot be used.
        StoreError: There is neither a file nor a dataset of that name.
    """
    if Path(text).exists():
        return _file(Path(text), format)
    artifact = _stored(text, workspace)
    if format not in (None, artifact.facts.format):
        raise DataError(
            "this dataset has another format",
            where=text,
            found=str(artifact.facts.format),
            expected=str(format),
            fix="leave `--format` out; `posttrain data convert` makes other formats",
        )
    return stored(artifact, text)


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


def _file(path: Path, format: str | None) -> Dataset:
    from posttrain_plugins.data.judging.cleaning import clean
    from posttrain_plugins.data.reading.files import read_table

    table = read_table(path)
    cleaned = clean(table, format=format, columns={}, drop_duplicates=False, limit=None)
    places = table.places if len(table.places) == len(cleaned.rows) else ()
    return Dataset(str(path), cleaned.format, lambda: iter(cleaned.rows), places=places)


def _stored(text: str, workspace: Path) -> Artifact:
    from posttrain_plugins.inspection.finding import find

    return find(text, workspace, frozenset({Kind.DATASET}))
