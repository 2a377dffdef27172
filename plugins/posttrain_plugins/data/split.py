"""The stage `data.split`: the rows of a dataset in parts, by their content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

from pydantic import model_validator

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import (
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageContext,
)
from posttrain.errors import DataError
from posttrain_plugins.data.derivation import expected, write_derived
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.problems import at_row
from posttrain_plugins.data.rows import SHARED, first_prompt_hash, stream_rows
from posttrain_plugins.data.splits import (
    SplitConfig,
    even_split,
    part_of,
    require_filled,
    split_names,
    split_ports,
)

Row = dict[str, Any]
Read = Callable[[], Iterable[Row]]
"""Begins to read the same rows anew."""


class DataSplitConfig(SplitConfig):
    """Into which parts, and what keeps rows together."""

    @model_validator(mode="after")
    def _some_parts(self) -> Self:
        if self.split is None:
            raise ValueError("`split` says into which parts, for example `split: {test: 0.05}`")
        return self


class Split(Stage):
    """Deal the rows of a dataset out to parts: where a row goes depends on its content alone."""

    config = DataSplitConfig
    shared = SHARED
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)
    target = "posttrain_plugins.data.split:run"

    def shrink(self, config: DataSplitConfig) -> Mapping[str, Any]:
        """Equal parts: of a handful of rows, a small fraction would stay empty."""
        return {"split": even_split(config.split)}

    def outputs(self, config: DataSplitConfig) -> tuple[Port, ...]:
        """One port for each part."""
        return split_ports(config, frozenset(FORMATS))

    def predict(self, config: DataSplitConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Each part is like the whole."""
        facts = expected(inputs["data"][0])
        return {name: Prediction(Kind.DATASET, facts) for name in split_names(config.split)}


@dataclass(frozen=True)
class Dealt:
    """Which part each row is in.

    Args:
        names: The parts.
        places: For each row, the place of its part in `names`.
        shared: How many prompts are in several parts.
    """

    names: tuple[str, ...]
    places: bytes
    shared: int

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each part."""
        found = Counter(self.places)
        return {name: found[place] for place, name in enumerate(self.names)}

    def rows(self, part: str, rows: Iterable[Row]) -> Iterator[Row]:
        """Return those of all rows that are in a part."""
        wanted = self.names.index(part)
        return compress(rows, (place == wanted for place in self.places))


def deal(read: Read, config: SplitConfig, format: str, source: str) -> Dealt:
    """Find the part of every row; keeps a byte a row and, unless split by prompt, the hash of each prompt.

    Raises:
        DataError: A part stays empty, or a row lacks the column that rows are grouped by.
    """
    names = split_names(config.split)
    index = {name: place for place, name in enumerate(names)}
    places = bytearray()
    seen: dict[str, int] = {}
    for row in read():
        try:
            place = index[part_of(row, config, format)]
        except DataError as error:
            raise at_row(error, len(places)) from error
        places.append(place)
        if config.split_by != "prompt":
            prompt = first_prompt_hash(row, format)
            seen[prompt] = seen.get(prompt, 0) | 1 << place
    shared = sum(parts.bit_count() > 1 for parts in seen.values())
    dealt = Dealt(names, bytes(places), shared)
    require_filled(dealt.counts(), config.split, source)
    return dealt


def run(context: StageContext) -> Outcome:
    """Write one dataset artifact for each part."""
    data = context.input("data")
    dealt = deal(lambda: stream_rows(data), context.config, data.facts.format, data.ref)
    for name in dealt.names:
        facts = write_derived(context.output(name), dealt.rows(name, stream_rows(data)), data)
        context.describe(name, Kind.DATASET, facts)
    if dealt.shared:
        context.note(shared_prompts(dealt), Level.WARNING)
    counts = dealt.counts()
    figures = {f"rows.{name}": float(count) for name, count in counts.items()}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Outcome(figures=figures, summary=summary)


def shared_prompts(dealt: Dealt) -> str:
    """Say that parts have prompts in common, and what keeps them apart."""
    return (
        f"{dealt.shared} prompts are in several parts, so that answers to them may be known from training; "
        "splitting by prompt keeps them apart"
    )
