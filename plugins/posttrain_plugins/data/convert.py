"""The stage `data.convert`: the rows of a dataset in another format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Row
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
    StageConfig,
    StageContext,
)
from posttrain.errors import DataError
from posttrain_plugins.data.derivation import write_derived
from posttrain_plugins.data.formats import CANONICAL, FORMATS, format_of
from posttrain_plugins.data.formats.routes import Route, route, with_turns
from posttrain_plugins.data.formats.values import counted
from posttrain_plugins.data.rows import SHARED, stream_rows

_LOST = {"nothing": "gave none", "invalid": "would not have suited it"}


class ConvertConfig(StageConfig):
    """What the rows are to become."""

    to: Annotated[Choice, Uses(Group.FORMAT, having=(("becomes", None),))] = Field(
        description="the format that the rows are to have, such as `unpaired_preference`"
    )
    every_answer: bool = Field(
        default=False,
        description="make a row of every answer of a conversation, with what stands before it, rather than of the last",
    )
    turns: bool = Field(
        default=False,
        description="make messages of strings: a prompt is the user's, an answer the assistant's",
    )
    skip_invalid: bool = Field(
        default=False,
        description="leave out rows that would not suit the format, such as an empty last answer, instead of refusing",
    )


class Convert(Stage):
    """Turn rows into those of another format; one row may become several, or none."""

    config = ConvertConfig
    shared = SHARED
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)
    target = "posttrain_plugins.data.convert:run"

    def outputs(self, config: ConvertConfig) -> tuple[Port, ...]:
        """The rows in the other format."""
        return (Port("data", frozenset({Kind.DATASET}), frozenset({config.to.name})),)

    def predict(self, config: ConvertConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The format is known, and whether the rows hold messages."""
        source = inputs["data"][0].facts
        turns = True if config.turns or config.to.name == "messages" else source.conversational
        facts = DatasetFacts(format=config.to.name, policy=source.policy, conversational=turns)
        return {"data": Prediction(Kind.DATASET, facts)}

    def check(self, config: ConvertConfig, inputs: Inputs) -> Iterable[Finding]:
        """Say early that there is no way from the one format to the other."""
        for source in inputs.get("data", ()):
            if source.facts.format not in CANONICAL or config.to.name not in CANONICAL:
                continue
            try:
                way(source.facts.format, config)
            except DataError as error:
                certainty = Certainty.VERIFIED if source.verified else Certainty.PREDICTED
                message = f"{error.message}; they become {error.expected}"
                yield Finding("convert", Level.ERROR, certainty, message, port="data", fix=error.fix)


def way(source: str, config: ConvertConfig) -> Route:
    """Return how rows of a format become those that the options ask for.

    Raises:
        DataError: There is no way.
    """
    formats = {name: format_of(name) for name in CANONICAL}
    return route(formats, source, config.to.name, every_answer=config.every_answer)


def converted(
    rows: Iterable[Row], path: Route, config: ConvertConfig, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield what rows become.

    Args:
        rows: The rows.
        path: How they change.
        config: What else is done to them.
        counts: Gets `rows`, `made`, `nothing` (rows of which nothing comes) and `invalid`.

    Raises:
        DataError: A row would not suit the format, or nothing comes of all of them.
    """
    judge = format_of(path.formats[-1])
    for row in rows:
        counts["rows"] += 1
        made = [with_turns(each) if config.turns else dict(each) for each in path.rows(row)]
        counts["nothing"] += not made
        for each in made:
            problem = judge.problem(each)
            if problem and not config.skip_invalid:
                raise DataError(
                    f"it would not suit `{path.formats[-1]}`: {problem}",
                    where=f"row {counts['rows']}",
                    fix="mend the row, or leave such rows out with `skip_invalid`",
                )
            counts["invalid" if problem else "made"] += 1
            if not problem:
                yield each
    if not counts["made"]:
        raise DataError(
            f"no `{path.formats[0]}` row gave a `{path.formats[-1]}` row",
            found=f"{counts['rows']} rows, {counts['invalid']} of them unsuited",
            fix="a conversation may lack an answer, or no completion be good",
        )


def run(context: StageContext) -> Outcome:
    """Convert every row."""
    config: ConvertConfig = context.config
    data = context.input("data")
    path = way(str(data.facts.format), config)
    counts: Counter[str] = Counter()
    rows = converted(stream_rows(data), path, config, counts)
    context.describe("data", Kind.DATASET, write_derived(context.output("data"), rows, data, config.to.name))
    figures = {name: float(counts[name]) for name in ("rows", "made", "nothing", "invalid")}
    return Outcome(figures=figures, summary=told(counts, path))


def told(counts: Counter[str], path: Route) -> str:
    """Return one line for people."""
    read = counted(counts["rows"], f"{path.formats[0]} row")
    line = f"{read} became {counted(counts['made'], f'{path.formats[-1]} row')}"
    lost = [f"{counts[name]} {what}" for name, what in _LOST.items() if counts[name]]
    return f"{line} ({', '.join(lost)})" if lost else line
