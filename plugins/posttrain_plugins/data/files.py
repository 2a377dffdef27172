"""Reading rows from local files: JSONL, JSON, CSV, Parquet, Arrow and saved datasets.

The first three are plain Python, so that planning can read them as well as a worker.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.problems import Problems

Row = dict[str, Any]

_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Table:
    """Rows and where each stands.

    Args:
        source: The file or dataset.
        rows: The rows.
        places: One for each row, such as `line 7`.
    """

    source: str
    rows: list[Row]
    places: list[str]


def read_table(path: Path, part: str | None = None) -> Table:
    """Read a file or a saved dataset directory.

    Args:
        path: What to read; the suffix says how.
        part: Which split of a saved dataset that has several.

    Raises:
        DataError: The file is missing, empty, of an unknown type, or malformed (with line numbers).
    """
    if not path.exists():
        raise DataError(
            "there is no such file",
            where=str(path),
            fix="check `path`; it is relative to the spec file's folder",
        )
    reader = _saved_dataset if path.is_dir() else _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"cannot read files that end in `{path.suffix}`",
            where=str(path),
            expected=", ".join(_READERS) + ", or a directory written by `Dataset.save_to_disk`",
        )
    table = reader(path, part)
    if not table.rows:
        raise DataError("the file holds no rows", where=str(path))
    return table


def is_plain(path: Path) -> bool:
    """Whether a file can be read without any library."""
    return path.is_file() and path.suffix.lower() in _PLAIN


def _jsonl(path: Path, part: str | None) -> Table:
    problems = Problems(str(path))
    rows, places = [], []
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"line {number}"
        row = _parsed(line, place, problems)
        if isinstance(row, dict):
            rows.append(row)
            places.append(place)
    problems.check(fix=_cut_off(content, problems))
    return Table(str(path), rows, places)


def _parsed(line: bytes, place: str, problems: Problems) -> Row | None:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_not_json)
    except UnicodeDecodeError as error:
        problems.add(place, f"byte {error.start + 1} of the line is not UTF-8 ({line[error.start]:#04x})")
        return None
    except ValueError as error:
        problems.add(place, f"invalid JSON: {error}")
        return None
    if not isinstance(value, dict):
        problems.add(place, f"a row must be a JSON object, not {_json_type(value)}")
        return None
    return value


def _cut_off(content: bytes, problems: Problems) -> str | None:
    last = content.count(b"\n") + 1
    broken = problems.count == 1 and problems.shown[0].startswith(f"line {last}: invalid JSON")
    return "the last line has no line break; the file may have been cut off" if broken else None


def _json(path: Path, part: str | None) -> Table:
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"), parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} is not UTF-8", where=str(path)) from error
    except ValueError as error:
        raise DataError(f"invalid JSON: {error}", where=str(path), fix=_jsonl_hint(path)) from error
    if not isinstance(value, list):
        raise DataError(
            "the file must hold an array of objects",
            where=str(path),
            found=_json_type(value)
            + (f" with the keys {', '.join(map(str, value))}" if isinstance(value, dict) else ""),
        )
    problems = Problems(str(path))
    places = [f"row {number}" for number in range(1, len(value) + 1)]
    for place, row in zip(places, value, strict=True):
        if not isinstance(row, dict):
            problems.add(place, f"a row must be a JSON object, not {_json_type(row)}")
    problems.check()
    return Table(str(path), value, places)


def _jsonl_hint(path: Path) -> str | None:
    with path.open("rb") as file:
        first = file.readline().strip()
    return (
        "one object a line is JSON Lines: name the file `.jsonl`" if first[:1] + first[-1:] == b"{}" else None
    )


def _csv(path: Path, part: str | None) -> Table:
    problems = Problems(str(path))
    rows, places = [], []
    try:
        with _long_fields(), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = _header(path, next(reader, []))
            for fields in reader:
                place = f"line {reader.line_num}"
                if not fields:
                    continue
                if len(fields) != len(header):
                    problems.add(place, f"{len(fields)} fields, but the header has {len(header)}")
                    continue
                rows.append(dict(zip(header, fields, strict=True)))
                places.append(place)
    except UnicodeDecodeError as error:
        raise DataError(f"the file is not UTF-8: {error.reason}", where=str(path)) from error
    except csv.Error as error:
        raise DataError(f"invalid CSV: {error}", where=f"{path}, line {reader.line_num}") from error
    problems.check()
    return Table(str(path), rows, places)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit of 131072 characters that the `csv` module puts on a field."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _header(path: Path, names: list[str]) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError("the header names a column twice", where=f"{path}, line 1", found=", ".join(repeated))
    return names


def _parquet(path: Path, part: str | None) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable Parquet file: {error}", where=str(path)) from error
    return numbered(str(path), rows)


def _arrow(path: Path, part: str | None) -> Table:
    import pyarrow
    from datasets import Dataset

    try:
        return numbered(str(path), Dataset.from_file(str(path)))
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable Arrow file: {error}", where=str(path)) from error


def _saved_dataset(path: Path, part: str | None) -> Table:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            "the directory is not a saved dataset",
            where=str(path),
            expected="what `Dataset.save_to_disk` writes",
            fix="give a file inside it",
        ) from error
    if not isinstance(saved, DatasetDict):
        return numbered(str(path), saved)
    if part not in saved:
        raise DataError(
            "the saved dataset has several splits"
            if part is None
            else f"the saved dataset has no split `{part}`",
            where=str(path),
            found=", ".join(saved),
            fix=f"choose one with `source_split: {next(iter(saved))}`",
        )
    return numbered(f"{path}[{part}]", saved[part])


def numbered(source: str, rows: Iterable[Row]) -> Table:
    """Return rows that stand on no line as a table; their places are their numbers."""
    listed = [dict(row) for row in rows]
    return Table(source, listed, [f"row {number}" for number in range(1, len(listed) + 1)])


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _json_type(value: Any) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


_PLAIN: dict[str, Callable[[Path, str | None], Table]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
}
_READERS = {**_PLAIN, ".parquet": _parquet, ".arrow": _arrow}
