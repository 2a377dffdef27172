"""The stage `data.synthetic`: rows of a seeded generator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageContext,
)
from posttrain.errors import DataError
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.generators.characters import BUILT_IN
from posttrain_plugins.data.rows import SHARED, Summary, is_conversation, prompt_hashes, write_rows
from posttrain_plugins.data.splits import SplitConfig, divide, even_split, split_names, split_ports

_MADE_WHILE_PLANNING = 20_000
_TINY_ROWS = 100


class SyntheticConfig(SplitConfig):
    """What to generate."""

    generator: Annotated[Choice, Uses(Group.GENERATOR)] = Field(description="the generator and its options")
    rows: PositiveInt = Field(description="how many rows, before they are split")
    seed: int = Field(default=0, description="seed of the generator")


class Synthetic(Stage):
    """Generate rows and split them."""

    config = SyntheticConfig
    shared = SHARED
    target = "posttrain_plugins.data.synthetic:run"

    def shrink(self, config: SyntheticConfig) -> Mapping[str, Any]:
        """A hundred rows at most, in equal parts."""
        return {"rows": min(config.rows, _TINY_ROWS), "split": even_split(config.split)}

    def outputs(self, config: SyntheticConfig) -> tuple[Port, ...]:
        """One port for each split, `data` without a split."""
        known = BUILT_IN.get(config.generator.name)
        return split_ports(config, frozenset({known.format} if known else FORMATS))

    def predict(self, config: SyntheticConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The built-in generators are run here already; of others nothing is known yet."""
        known = BUILT_IN.get(config.generator.name)
        facts = DatasetFacts(format=known.format, columns=known.columns) if known else DatasetFacts()
        if known and _fits(config):
            first = next(iter(_made(config.model_copy(update={"rows": 1}))))
            facts = facts.model_copy(update={"conversational": is_conversation(first, known.format)})
        parts = (_planned(config) if _fits(config) else None) or {}
        return {
            name: Prediction(Kind.DATASET, parts[name].facts if name in parts else facts)
            for name in split_names(config.split)
        }

    def check(self, config: SyntheticConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a generator that cannot make that many rows, or an empty split."""
        try:
            _planned(config)
        except DataError as error:
            yield Finding("data", Level.ERROR, Certainty.VERIFIED, str(error))

    def prompts(self, config: SyntheticConfig, port: str, base: Path) -> frozenset[str] | None:
        """Prompt hashes of a built-in generator's rows."""
        parts = _planned(config) if _fits(config) else None
        return None if parts is None else parts[port].prompts


def run(context: StageContext) -> Outcome:
    """Write one dataset artifact for each split."""
    config: SyntheticConfig = context.config
    generator = context.component(config.generator, Group.GENERATOR)
    rows = [dict(row) for row in generator.plugin(generator.config, config.rows, config.seed)]
    if len(rows) != config.rows:
        raise DataError(
            f"the generator `{generator.name}` made {len(rows)} rows", expected=f"{config.rows} rows"
        )
    parts = divide(rows, config, generator.plugin.format, generator.name)
    for name, part in parts.items():
        facts = write_rows(context.output(name), part, generator.plugin.format)
        context.describe(name, Kind.DATASET, facts)
    counts = ", ".join(f"{len(part)} {name}" for name, part in parts.items())
    figures = {f"rows.{name}": float(len(part)) for name, part in parts.items()}
    return Outcome(figures=figures, summary=f"{generator.name}: {counts}")


def _fits(config: SyntheticConfig) -> bool:
    """Whether the rows can be made at all; `check` says why not."""
    try:
        _planned(config)
    except DataError:
        return False
    return True


@dataclass(frozen=True)
class _Part:
    facts: DatasetFacts
    prompts: frozenset[str]


def _planned(config: SyntheticConfig) -> Mapping[str, _Part] | None:
    """Return the facts and prompt hashes of each part; None when it has to wait for the worker."""
    if config.generator.name not in BUILT_IN or config.rows > _MADE_WHILE_PLANNING:
        return None
    return _parts(config.model_dump_json())


@lru_cache(maxsize=32)
def _parts(options: str) -> Mapping[str, _Part]:
    config = SyntheticConfig.model_validate_json(options)
    format = BUILT_IN[config.generator.name].format
    parts = divide(list(_made(config)), config, format, config.generator.name)
    return {name: _described(part, format) for name, part in parts.items()}


def _described(rows: list[dict[str, Any]], format: str) -> _Part:
    summary = Summary(format)
    for row in rows:
        summary.add(row)
    return _Part(summary.facts(), frozenset(each for row in rows for each in prompt_hashes(row, format)))


def _made(config: SyntheticConfig) -> Iterator[dict[str, Any]]:
    generator = BUILT_IN[config.generator.name]()
    options = generator.config.model_validate(config.generator.options)
    return iter(generator(options, config.rows, config.seed))
