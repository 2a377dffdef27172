"""The stage `data.load`: rows from a local file or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format
from posttrain.contracts.registration import Group
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
from posttrain_plugins.data.formats import BUILT_IN, FORMATS, format_of
from posttrain_plugins.data.judging.cleaning import Cleaned, ImagesLeft, clean
from posttrain_plugins.data.reading.files import Heard, Readable, is_plain, open_file
from posttrain_plugins.data.rows import SHARED, RowWriter, Summary, prompt_hashes
from posttrain_plugins.data.splits import (
    SplitConfig,
    even_split,
    part_of,
    require_filled,
    split_names,
    split_ports,
)
from posttrain_plugins.stopping import pauses

if TYPE_CHECKING:
    from posttrain_plugins.data.images.gallery import Gallery

_READ_WHILE_PLANNING = 4 * 1024 * 1024
"""Bytes; larger files are left to the worker, since every command plans anew."""
_TINY_ROWS = 200


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
    format: Annotated[Choice | None, Uses(Group.FORMAT)] = Field(
        default=None,
        description="what the rows are, such as `preference` or `sharegpt`; recognised from the columns of all rows "
        "when left out",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="new names of columns by their old names, such as `{question: prompt}`",
    )
    json_columns: tuple[str, ...] = Field(
        default=(),
        description="columns, by their new names, whose text is JSON to be parsed, as in CSV files with messages",
    )
    images: Annotated[str | None, SourceMark()] = Field(
        default=None, description="the folder that holds the image files which rows name by their paths"
    )
    skip_invalid: bool = Field(
        default=False, description="leave out rows that do not suit the format instead of refusing the file"
    )
    drop_duplicates: bool = Field(default=False, description="keep the first of equal rows only")
    limit: PositiveInt | None = Field(
        default=None, description="keep this many rows, chosen by their content rather than by their place"
    )
    stream: PositiveInt | None = Field(
        default=None,
        description="of a hub `id`, read this many first rows over the network without storing the dataset",
    )
    download: Annotated[bool, VolatileMark()] = Field(
        default=False, description="let this stage use the network"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.id is None):
            raise ValueError("give either `path`, a local file, or `id`, a dataset of the Hugging Face hub")
        if self.path is not None and (self.revision or self.subset or self.stream):
            raise ValueError("`revision`, `subset` and `stream` belong to a hub `id`, not to a local `path`")
        if self.id is not None and self.images is not None:
            raise ValueError("`images` belongs to a local `path`; the datasets of the hub hold their images")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError("`columns` gives one new name to several columns")
        return self


class Load(Stage):
    """Read, judge, thin out and split rows."""

    config = LoadConfig
    shared = SHARED
    target = "posttrain_plugins.data.load:run"

    def shrink(self, config: LoadConfig) -> Mapping[str, Any]:
        """Two hundred rows at most, in equal parts."""
        return {"limit": min(config.limit or _TINY_ROWS, _TINY_ROWS), "split": even_split(config.split)}

    def outputs(self, config: LoadConfig) -> tuple[Port, ...]:
        """One port for each split, `data` without a split."""
        name = _canonical_name(config)
        known = frozenset(FORMATS) if config.format is None else frozenset({name} if name else ())
        return split_ports(config, known)

    def predict(self, config: LoadConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Local text files are read here already; the rest is known by its format alone."""
        planned = _planned(config)
        if planned is not None and planned.parts:
            return {name: Prediction(Kind.DATASET, part.facts) for name, part in planned.parts.items()}
        facts = DatasetFacts(format=_canonical_name(config))
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
    source = Heard(_source(config), pauses(context, "rows", "the loading"))
    given = _given(config, context)
    cleaned = _cleaned(source, config, given, _gallery(config, context.work))
    for note in cleaned.notes:
        context.note(note)
    if cleaned.duplicates:
        done = "dropped" if config.drop_duplicates else "kept; `drop_duplicates: true` drops them"
        context.note(f"{cleaned.duplicates} rows equal an earlier one: {done}")
    counts = _write(context, config, cleaned, given if given and given.becomes is None else None)
    require_filled(counts, config.split, source.source)
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    figures = {f"rows.{name}": float(count) for name, count in counts.items()}
    return Outcome(figures=figures, summary=f"{cleaned.format} rows: {told}")


def _write(
    context: StageContext, config: LoadConfig, cleaned: Cleaned, given: Format | None
) -> dict[str, int]:
    """Write every row to its part, as it is read; describe the parts and return their sizes."""
    from posttrain_plugins.data.images.image import copy_images

    names = split_names(config.split)
    counts = dict.fromkeys(names, 0)
    images: dict[str, set[str]] = {name: set() for name in names}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(RowWriter(context.output(name), cleaned.format, given))
            for name in names
        }
        for row in cleaned.read():
            name = part_of(row, config, given or cleaned.format)
            writers[name].add(row, judged=True)
            counts[name] += 1
            if cleaned.images:
                images[name].update(row.get("images") or ())
    for name, writer in writers.items():
        if counts[name]:
            copy_images(images[name], context.work, context.output(name))
            context.describe(name, Kind.DATASET, writer.facts())
    return counts


def _source(config: LoadConfig) -> Readable:
    if config.path is not None:
        return open_file(Path(config.path), config.source_split)
    return hub.load_dataset(
        str(config.id),
        revision=config.revision,
        subset=config.subset,
        part=config.source_split,
        download=config.download,
        stream=config.stream,
    )


def _given(config: LoadConfig, context: StageContext) -> Format | None:
    """Return the format where it comes from another plugin."""
    if config.format is None or config.format.name in BUILT_IN:
        return None
    found = context.component(config.format, Group.FORMAT).plugin
    if found.becomes is not None:
        format_of(found.becomes)
    return found  # type: ignore[no-any-return]


def _gallery(config: LoadConfig, directory: Path) -> Gallery:
    from posttrain_plugins.data.images.gallery import Gallery

    path = None if config.path is None else Path(config.path)
    base = path if path is None or path.is_dir() else path.parent
    return Gallery(directory, base, None if config.images is None else Path(config.images))


def _cleaned(
    source: Readable, config: LoadConfig, given: Format | None = None, gallery: Gallery | None = None
) -> Cleaned:
    return clean(
        source,
        format=None if config.format is None else config.format.name,
        columns=config.columns,
        drop_duplicates=config.drop_duplicates,
        limit=config.limit,
        given=given,
        json_columns=config.json_columns,
        skip_invalid=config.skip_invalid,
        gallery=gallery,
    )


def _canonical_name(config: LoadConfig) -> str | None:
    """Return the format that the rows will have, where the options tell."""
    known = BUILT_IN.get(config.format.name) if config.format else None
    return known.becomes or (config.format.name if config.format else None) if known else None


@dataclass(frozen=True)
class _Part:
    facts: DatasetFacts
    prompts: frozenset[str]


@dataclass(frozen=True)
class _Planned:
    parts: Mapping[str, _Part]
    error: DataError | None = None


def refusal(config: LoadConfig, base: Path) -> DataError | None:
    """Return what is wrong with a small local text file; None where nothing is, or only the worker can tell."""
    config = _absolute(config, base)
    planned = _planned(config) if config.path is not None and Path(config.path).exists() else None
    return None if planned is None else planned.error


def _planned(config: LoadConfig) -> _Planned | None:
    """Return what a small local text file gives; None when it has to wait for the worker."""
    if config.path is None or not is_plain(Path(config.path)) or _left_to_the_worker(config):
        return None
    if config.format is not None and config.format.name not in BUILT_IN:
        return None
    stat = Path(config.path).stat()
    return _read_for_plan(config.model_dump_json(), stat.st_size, stat.st_mtime_ns)


def _left_to_the_worker(config: LoadConfig) -> bool:
    path = None if config.path is None else Path(config.path)
    return path is not None and is_plain(path) and path.stat().st_size > _READ_WHILE_PLANNING


@lru_cache(maxsize=32)
def _read_for_plan(options: str, size: int, modified: int) -> _Planned | None:
    config = LoadConfig.model_validate_json(options)
    try:
        source = _source(config)
        cleaned = _cleaned(source, config)
        return _Planned(_described(cleaned, config, source.source))
    except ImagesLeft:
        return None
    except DataError as error:
        return _Planned({}, error)


def _described(cleaned: Cleaned, config: LoadConfig, source: str) -> dict[str, _Part]:
    names = split_names(config.split)
    summaries = {name: Summary(cleaned.format) for name in names}
    prompts: dict[str, set[str]] = {name: set() for name in names}
    for row in cleaned.read():
        name = part_of(row, config, cleaned.format)
        summaries[name].add(row)
        prompts[name].update(prompt_hashes(row, cleaned.format))
    require_filled({name: each.count for name, each in summaries.items()}, config.split, source)
    return {name: _Part(each.facts(), frozenset(prompts[name])) for name, each in summaries.items()}


def _absolute(config: LoadConfig, base: Path) -> LoadConfig:
    paths = {"path": config.path, "images": config.images}
    return config.model_copy(
        update={name: str(base / path) for name, path in paths.items() if path is not None}
    )


def _error(message: str, fix: str | None) -> Finding:
    return Finding("data", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
