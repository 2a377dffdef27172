"""The stage `data.mix`: rows of several datasets as one, in given shares."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageConfig,
    StageContext,
)
from posttrain.errors import DataError
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.images.image import copy_images
from posttrain_plugins.data.row_file import RowFile
from posttrain_plugins.data.rows import SHARED, write_rows
from posttrain_plugins.data.shares import Stop, counts_of


class MixConfig(StageConfig):
    """How much of each dataset."""

    weights: tuple[float, ...] = Field(
        default=(),
        description="the share of each dataset, in the order of the inputs; they need not add up to 1, and a dataset "
        "with weight 0 is left out. Without them every row is used once, or with `rows` each dataset in proportion",
    )
    stop: Literal["first_exhausted", "all_exhausted"] = Field(
        default="first_exhausted",
        description="how many rows, with `weights`: as many as there are until the first dataset is used up, or until "
        "all are, for which `repeat` has to be allowed",
    )
    rows: PositiveInt | None = Field(default=None, description="this many rows instead of `stop`")
    repeat: bool = Field(
        default=False, description="use rows of a dataset again once all of them have been used"
    )
    names: tuple[str, ...] = Field(
        default=(), description="what the datasets are called in `source_column` and in the figures"
    )
    source_column: str | None = Field(
        default=None, description="a column to add that says which dataset a row is of"
    )
    seed: int = Field(default=0, ge=0, description="which rows, and in which order")

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if any(weight < 0 for weight in self.weights) or (self.weights and not any(self.weights)):
            raise ValueError("weights must not be negative, and one at least must be above 0")
        if self.weights and self.stop == "all_exhausted" and self.rows is None and not self.repeat:
            raise ValueError(
                "with weights, using up all datasets takes rows of the smaller ones again: set `repeat: true`, or "
                "leave `weights` out to use every row once"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("`names` calls two datasets the same")
        if self.names and self.weights and len(self.names) != len(self.weights):
            raise ValueError(f"there are {len(self.names)} names and {len(self.weights)} weights")
        return self


class Mix(Stage):
    """Take rows of several datasets in exact shares, chosen by their content and the seed, and shuffle them."""

    config = MixConfig
    shared = SHARED
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS), many=True),)
    target = "posttrain_plugins.data.mix:run"

    def shrink(self, config: MixConfig) -> Mapping[str, Any]:
        """Repeat rows where a smoke run has fewer than are asked for."""
        return {"repeat": True, "rows": min(config.rows, 200)} if config.rows else {}

    def outputs(self, config: MixConfig) -> tuple[Port, ...]:
        """The mixture."""
        return (Port("data", frozenset({Kind.DATASET}), frozenset(FORMATS)),)

    def predict(self, config: MixConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """What all datasets have in common."""
        facts = [source.facts for source in _used(config, inputs.get("data", ()))]
        sizes = [source.facts.rows for source in inputs.get("data", ())]
        rows = None
        if all(sizes) and not _count_problem(config, len(sizes)):
            try:
                rows = sum(
                    counts_of([int(size) for size in sizes], config.weights, _stop(config), config.repeat)
                )
            except DataError:
                rows = None  # `check` says why
        common = DatasetFacts(
            format=_same([each.format for each in facts]),
            policy=_same([each.policy for each in facts]),
            conversational=_same([each.conversational for each in facts]),
            rows=rows,
        )
        return {"data": Prediction(Kind.DATASET, common)}

    def check(self, config: MixConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report different formats, weights without a dataset, and too few rows."""
        sources = inputs.get("data", ())
        sure = all(source.verified for source in sources)
        certainty = Certainty.VERIFIED if sure else Certainty.PREDICTED
        problem = _count_problem(config, len(sources)) or _format_problem(
            [source.facts.format for source in _used(config, sources)]
        )
        sizes = [source.facts.rows for source in sources]
        if problem is None and all(sizes):
            try:
                counts_of([int(size) for size in sizes], config.weights, _stop(config), config.repeat)
            except DataError as error:
                problem = f"{error.message}: {error.found}"
        if problem:
            yield Finding("mix", Level.ERROR, certainty, problem, port="data")


def mixed(counts: Sequence[int], seed: int, identities: Sequence[Sequence[bytes]]) -> list[tuple[int, int]]:
    """Choose rows and shuffle them.

    Args:
        counts: How many rows are wanted of each dataset; more than there are means that all come up again.
        seed: Which rows, and in which order.
        identities: A hash of each row of each dataset; they decide which rows, wherever these stand.

    Returns:
        (dataset, row) pairs, from 0.
    """
    order: list[tuple[int, int]] = []
    key = seed.to_bytes(8, "big")
    for source, (hashes, count) in enumerate(zip(identities, counts, strict=True)):
        whole, rest = divmod(count, len(hashes))
        order.extend((source, row) for _ in range(whole) for row in range(len(hashes)))
        ranks = [hashlib.blake2b(each, key=key).digest() for each in hashes] if rest else []
        ranked = sorted(range(len(ranks)), key=ranks.__getitem__)
        order.extend((source, row) for row in sorted(ranked[:rest]))
    random.Random(seed).shuffle(order)
    return order


def require_alike(config: MixConfig, formats: Sequence[str | None]) -> None:
    """Refuse datasets of different formats, and weights or names that are not one for each.

    Raises:
        DataError: They do not go together.
    """
    _require(_count_problem(config, len(formats)))
    _require(_format_problem(_used(config, formats)))


def chosen(
    config: MixConfig, files: Sequence[RowFile], names: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return how many rows each dataset gives, and which in which order, as `mixed`.

    Raises:
        DataError: A dataset is empty, or has too few rows.
    """
    for name, file in zip(names, files, strict=True):
        _require(None if len(file) else f"dataset {name} is empty")
    counts = counts_of([len(file) for file in files], config.weights, _stop(config), config.repeat)
    return counts, mixed(counts, config.seed, [file.hashes for file in files])


def run(context: StageContext) -> Outcome:
    """Choose, shuffle and write rows."""
    config: MixConfig = context.config
    sources = context.inputs["data"]
    require_alike(config, [each.facts.format for each in sources])
    names = config.names or numbered(len(sources))
    with ExitStack() as stack:
        files = [stack.enter_context(closing(RowFile(each.path))) for each in sources]
        counts, order = chosen(config, files, names)
        facts = _write(context, config, files, order, names)
    context.describe("data", Kind.DATASET, facts)
    _note_kinds(context, _used(config, sources))
    figures = {f"rows.{name}": float(count) for name, count in zip(names, counts, strict=True)}
    return Outcome(figures={"rows": float(len(order)), **figures}, summary=told(counts, names))


def numbered(count: int) -> tuple[str, ...]:
    """Return the names of datasets that have none."""
    return tuple(map(str, range(1, count + 1)))


def told(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return one line for people."""
    shown = ", ".join(f"{count} of {name}" for name, count in zip(names, counts, strict=True))
    return f"{sum(counts)} rows: {shown}"


def _write(
    context: StageContext,
    config: MixConfig,
    files: Sequence[RowFile],
    order: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> DatasetFacts:
    sources, output = context.inputs["data"], context.output("data")
    used = [each.facts for each in _used(config, sources)]
    images: dict[int, set[str]] = {place: set() for place in range(len(files))}
    rows = _noting(mixture(files, order, config.source_column, names), order, images)
    facts = write_rows(output, rows, str(used[0].format), _same([each.policy for each in used]))
    for place, wanted in images.items():
        copy_images(wanted, sources[place].path, output)
    return facts


def mixture(
    files: Sequence[RowFile], order: Sequence[tuple[int, int]], column: str | None, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows in their order.

    Args:
        files: The datasets.
        order: (dataset, row) pairs.
        column: Says of which dataset a row is; None for no such column.
        names: What the datasets are called there.

    Raises:
        DataError: Rows have that column already.
    """
    for source, index in order:
        row = files[source][index]
        if column is not None:
            if column in row:
                raise DataError(
                    f"the rows of dataset {names[source]} have a column `{column}` already",
                    fix="choose another name for `source_column`",
                )
            row[column] = names[source]
        yield row


def _noting(
    rows: Iterable[dict[str, Any]], order: Sequence[tuple[int, int]], images: Mapping[int, set[str]]
) -> Iterator[dict[str, Any]]:
    """Note the images of rows by the dataset that has them."""
    for row, (source, _) in zip(rows, order, strict=True):
        images[source].update(row.get("images") or ())
        yield row


def _stop(config: MixConfig) -> Stop | int:
    if config.rows is not None:
        return config.rows
    return Stop.EVERY_ROW if not config.weights else Stop(config.stop)


def _used(config: MixConfig, sources: Sequence[Any]) -> list[Any]:
    """Return the datasets whose weight is not 0."""
    if len(config.weights) != len(sources):
        return list(sources)
    return [source for source, weight in zip(sources, config.weights, strict=True) if weight]


def _count_problem(config: MixConfig, sources: int) -> str | None:
    for what, given in (("weights", config.weights), ("names", config.names)):
        if given and len(given) != sources:
            return f"there are {len(given)} {what} for {sources} datasets"
    return None


def _format_problem(formats: Sequence[str | None]) -> str | None:
    known = sorted({each for each in formats if each is not None})
    if len(known) < 2:
        return None
    return f"the datasets have different formats, {', '.join(known)}; `data.convert` makes them the same"


def _require(problem: str | None) -> None:
    if problem:
        raise DataError(problem, where="data.mix")


def _note_kinds(context: StageContext, used: Sequence[Artifact]) -> None:
    kinds = {each.facts.conversational for each in used}
    if {True, False} <= kinds:
        context.note(
            "some datasets hold strings and others messages; only the latter are written with the chat template",
            Level.WARNING,
        )


def _same(values: Sequence[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else None
