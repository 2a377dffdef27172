"""The stage `data.load`: rows from a local file or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    SourceMark,
    Stage,
    StageContext,
    VolatileMark,
)
from posttrain.errors import DataError
from posttrain_plugins import hub
from posttrain_plugins.data.cleaning import Cleaned, clean
from posttrain_plugins.data.files import Table, is_plain, read_table
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.rows import is_conversation, prompt_hashes, shared_columns, write_rows
from posttrain_plugins.data.splits import SplitConfig, divide, even_split, split_names, split_ports

_READ_WHILE_PLANNING = 4 * 1024 * 1024
"""Bytes; larger files are left to the worker, since every command plans anew."""
_TINY_ROWS = 200

Format = Literal["text", "messages", "prompt", "prompt_completion", "preference"]


class LoadConfig(SplitConfig):
    """Where the rows are and what to do with them."""

    path: Annotated[str | None, SourceMark()] = Field(
        default=None,
        description="a JSONL, JSON, CSV, Parquet or Arrow file, or the directory of a saved dataset",
    )
    id: str | None = Field(default=None, description="a dataset of the Hugging Face hub, instead of `path`")
    revision: str | None = Field(
        default=None,
        description="its commit; without one the data may change unnoticed, and the stage is never cached",
    )
    subset: str | None = Field(default=None, description="the name of one of its configurations")
    source_split: str | None = Field(
        default=None, description="the split to read, of the hub's or of a saved dataset with several"
    )
    format: Format | None = Field(
        default=None, description="what the rows are; recognised from the columns when left out"
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="new names of columns by their old names, such as `{question: prompt}`",
    )
    drop_duplicates: bool = Field(default=False, description="keep the first of equal rows only")
    limit: PositiveInt | None = Field(
        default=None, description="keep this many rows, chosen by their content rather than by their place"
    )
    download: Annotated[bool, VolatileMark()] = Field(
        default=False, description="let this stage use the network"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.id is None):
            raise ValueError("give either `path`, a local file, or `id`, a dataset of the Hugging Face hub")
        if self.path is not None and (self.revision or self.subset):
            raise ValueError("`revision` and `subset` belong to a hub `id`, not to a local `path`")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError("`columns` gives one new name to several columns")
        return self


class Load(Stage):
    """Read, judge, thin out and split rows."""

    config = LoadConfig
    target = "posttrain_plugins.data.load:run"

    def shrink(self, config: LoadConfig) -> Mapping[str, Any]:
        """Two hundred rows at most, in equal parts."""
        return {"limit": min(config.limit or _TINY_ROWS, _TINY_ROWS), "split": even_split(config.split)}

    def outputs(self, config: LoadConfig) -> tuple[Port, ...]:
        """One port for each split, `data` without a split."""
        formats = frozenset({config.format}) if config.format else frozenset(FORMATS)
        return split_ports(config, formats)

    def predict(self, config: LoadConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Local text files are read here already; the rest is known by its format alone."""
        planned = _planned(config)
        if planned is not None and planned.parts:
            return {name: Prediction(Kind.DATASET, part.facts) for name, part in planned.parts.items()}
        facts = DatasetFacts(format=config.format)
        return {name: Prediction(Kind.DATASET, facts) for name in split_names(config.split)}

    def check(self, config: LoadConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a missing file, and whatever reading a small file shows."""
        if config.path is not None and not Path(config.path).exists():
            yield _error(
                f"there is no file {config.path}", "check `path`; it is relative to the spec file's folder"
            )
            return
        if _left_to_the_worker(config):
            limit = f"{_READ_WHILE_PLANNING // 1024**2} MB"
            message = f"{config.path} is larger than {limit}; its rows are not known before they are loaded"
            yield Finding("data", Level.NOTE, Certainty.UNKNOWN, message)
        planned = _planned(config)
        if planned is not None and planned.error is not None:
            yield _error(str(planned.error), None)

    def pinned(self, config: LoadConfig) -> str | None:
        """A hub id needs a commit."""
        return hub.moves(config.id, config.revision)

    def prompts(self, config: LoadConfig, port: str, base: Path) -> frozenset[str] | None:
        """Prompt hashes of a local text file."""
        planned = _planned(_absolute(config, base))
        part = planned.parts.get(port) if planned is not None else None
        return None if part is None else part.prompts


def run(context: StageContext) -> Outcome:
    """Write one dataset artifact for each split."""
    config = _absolute(context.config, context.base)
    table = _table(config)
    cleaned = _cleaned(table, config)
    if cleaned.duplicates:
        done = "dropped" if config.drop_duplicates else "kept; `drop_duplicates: true` drops them"
        context.note(f"{cleaned.duplicates} rows equal an earlier one: {done}")
    parts = divide(cleaned.rows, config, cleaned.format, table.source)
    for name, rows in parts.items():
        context.describe(name, Kind.DATASET, write_rows(context.output(name), rows, cleaned.format))
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in parts.items())
    figures = {f"rows.{name}": float(len(rows)) for name, rows in parts.items()}
    return Outcome(figures=figures, summary=f"{cleaned.format} rows: {counts}")


def _table(config: LoadConfig) -> Table:
    if config.path is not None:
        return read_table(Path(config.path), config.source_split)
    return hub.load_dataset(
        str(config.id),
        revision=config.revision,
        subset=config.subset,
        part=config.source_split,
        download=config.download,
    )


def _cleaned(table: Table, config: LoadConfig) -> Cleaned:
    return clean(
        table,
        format=config.format,
        columns=config.columns,
        drop_duplicates=config.drop_duplicates,
        limit=config.limit,
    )


@dataclass(frozen=True)
class _Part:
    facts: DatasetFacts
    prompts: frozenset[str]


@dataclass(frozen=True)
class _Planned:
    parts: Mapping[str, _Part]
    error: DataError | None = None


def _planned(config: LoadConfig) -> _Planned | None:
    """Return what a small local text file gives; None when it has to wait for the worker."""
    if config.path is None or not is_plain(Path(config.path)) or _left_to_the_worker(config):
        return None
    stat = Path(config.path).stat()
    return _read_for_plan(config.model_dump_json(), stat.st_size, stat.st_mtime_ns)


def _left_to_the_worker(config: LoadConfig) -> bool:
    path = None if config.path is None else Path(config.path)
    return path is not None and is_plain(path) and path.stat().st_size > _READ_WHILE_PLANNING


@lru_cache(maxsize=32)
def _read_for_plan(options: str, size: int, modified: int) -> _Planned:
    config = LoadConfig.model_validate_json(options)
    try:
        table = _table(config)
        cleaned = _cleaned(table, config)
        parts = divide(cleaned.rows, config, cleaned.format, table.source)
    except DataError as error:
        return _Planned({}, error)
    return _Planned({name: _described(rows, cleaned.format) for name, rows in parts.items()})


def _described(rows: list[dict[str, Any]], format: str) -> _Part:
    columns: tuple[str, ...] | None = None
    for row in rows:
        columns = shared_columns(columns, row, format)
    turns = any(is_conversation(row, format) for row in rows)
    facts = DatasetFacts(format=format, columns=columns, rows=len(rows), conversational=turns)
    return _Part(facts, frozenset(each for row in rows for each in prompt_hashes(row, format)))


def _absolute(config: LoadConfig, base: Path) -> LoadConfig:
    return config if config.path is None else config.model_copy(update={"path": str(base / config.path)})


def _error(message: str, fix: str | None) -> Finding:
    return Finding("data", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
