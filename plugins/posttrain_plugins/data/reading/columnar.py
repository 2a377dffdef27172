"""Parquet, Arrow and saved datasets, read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import DataError

Row = dict[str, Any]

_ROWS_AT_ONCE = 256
_KEPT = frozenset({"content"})
"""Keys of a message that say something when they are null."""


def parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: It cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", where=str(path)) from error


def arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow file.

    Raises:
        DataError: It cannot be read.
    """
    import pyarrow
    from datasets import Dataset

    try:
        found = Dataset.from_file(str(path))
    except (pyarrow.ArrowException, OSError, TypeError) as error:
        raise DataError(f"not a readable Arrow file: {error}", where=str(path)) from error
    yield from rows_of(found)


def saved(path: Path, part: str | None) -> tuple[str, Callable[[], Iterator[Row]]]:
    """Open a directory that `Dataset.save_to_disk` wrote; return its name and what yields its rows.

    Raises:
        DataError: It is none, or it has several splits and `part` is none of them.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            "the directory is not a saved dataset",
            where=str(path),
            expected="what `Dataset.save_to_disk` writes",
            fix="give a file inside it",
        ) from error
    if not isinstance(found, DatasetDict):
        return str(path), lambda: rows_of(found)
    if part not in found:
        raise DataError(
            "the saved dataset has several splits"
            if part is None
            else f"the saved dataset has no split `{part}`",
            where=str(path),
            found=", ".join(found),
            fix=f"choose one with `source_split: {next(iter(found))}`",
        )
    return f"{path}[{part}]", lambda: rows_of(found[part])


def rows_of(dataset: Any) -> Iterator[Row]:
    """Yield the rows of a dataset of the `datasets` library; images stay the bytes or paths that were stored."""
    return iter(_undecoded(dataset))


def unmerged(value: Any) -> Any:
    """Return a value of turns or tools without the null keys that Arrow gave its objects.

    Arrow stores the objects of a list as structs with the keys of all of them. A key that is null there was most
    probably absent; a `null` that was meant, such as a parameter's default, survives only as JSON text.
    """
    if isinstance(value, dict):
        return {
            key: unmerged(inner)
            for key, inner in value.items()
            if inner is not None or (key in _KEPT and "role" in value)
        }
    return [unmerged(inner) for inner in value] if isinstance(value, list) else value


def _undecoded(dataset: Any) -> Iterable[Row]:
    """Keep the library from turning stored images into pictures."""
    from datasets import Image, Sequence
    from datasets import List as Listed

    features = dataset.features or {}
    for name, feature in features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, Listed | Sequence) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, Listed(Image(decode=False)))
    return dataset  # type: ignore[no-any-return]
