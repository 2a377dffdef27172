"""The stage `data.elo`: ratings of the answers to each prompt, from pairs of which one has won."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.artifacts.manifest import canonical
from posttrain.contracts.stage import (
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
from posttrain_plugins.data.formats.values import weight_problem
from posttrain_plugins.data.ratings import ratings
from posttrain_plugins.data.rows import SHARED, stream_rows, write_rows
from posttrain_plugins.handoffs.lineage import certainty

Row = Mapping[str, Any]
BESIDE = ("prompt", "tools", "chat_template_kwargs")
"""The columns that tell what is asked."""
IMAGES = ("image", "images")
UNITS: Mapping[str, float] = {"logit": 1.0, "elo": 400 / math.log(10)}
"""What a difference of 1 in log-odds is called on each scale."""


class EloConfig(StageConfig):
    """Options of `data.elo`."""

    prior: float = Field(
        default=0.5,
        gt=0,
        description="imagined wins, and as many losses, of every answer against an average one: they keep answers "
        "finite that have always won or lost, and pull ratings towards 0; 0.5 of each for answers with few pairs",
    )
    scale: Literal["logit", "elo"] = Field(
        default="logit",
        description="unit of the scores: with `logit` a difference of 1 means odds of e to 1, as that of two rewards "
        "does; with `elo` a difference of 400 means odds of 10 to 1",
    )
    wins_column: str | None = Field(
        default=None,
        min_length=1,
        description="column that says how often the chosen answer has won; unset: once a row",
    )


class Elo(Stage):
    """Fit a rating to every answer from pairs of answers to its prompt, of which one was preferred.

    Rows with the same prompt, tools and template arguments belong together, and equal answers are one. A prompt's
    answers come out as one row of the format `ranked`; other columns are left out, as they belong to pairs.
    """

    config = EloConfig
    shared = SHARED
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset({"preference"})),)
    target = "posttrain_plugins.data.elo:run"

    def outputs(self, config: EloConfig) -> tuple[Port, ...]:
        """The answers of each prompt with their ratings."""
        return (Port("data", frozenset({Kind.DATASET}), formats=frozenset({"ranked"})),)

    def predict(self, config: EloConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Rankings of the same answers."""
        facts: DatasetFacts = inputs["data"][0].facts
        predicted = DatasetFacts(
            format="ranked", policy=facts.policy, conversational=facts.conversational, calls=facts.calls
        )
        return {"data": Prediction(Kind.DATASET, predicted)}

    def check(self, config: EloConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a column that not every row has."""
        for data in inputs.get("data", ()):
            columns = data.facts.columns
            if config.wins_column is not None and columns is not None and config.wins_column not in columns:
                yield Finding(
                    "elo",
                    Level.ERROR,
                    certainty(data),
                    f"not every row has the column `{config.wins_column}`",
                    port="data",
                    fix=f"name one of {', '.join(columns)}, or leave wins_column out",
                )


@dataclass
class Contest:
    """The answers to one prompt, and how often each has won against each.

    Args:
        rest: The prompt and what stands beside it.
        answers: The answers by what they say, in the order in which they come.
        wins: How often (one, other) ended with the one's win.
    """

    rest: dict[str, Any]
    answers: dict[bytes, Any] = field(default_factory=dict)
    wins: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, row: Row, count: float) -> None:
        """Take in one pair."""
        for side in ("chosen", "rejected"):
            self.answers.setdefault(canonical(row[side]), row[side])
        places = {said: place for place, said in enumerate(self.answers)}
        chosen, rejected = (places[canonical(row[side])] for side in ("chosen", "rejected"))
        self.wins[chosen, rejected] += count  # type: ignore[assignment]

    def row(self, config: EloConfig) -> dict[str, Any]:
        """Return the answers with their ratings."""
        found = ratings(self.wins, len(self.answers), config.prior)
        scores = [rating * UNITS[config.scale] for rating in found]
        return {**self.rest, "completions": list(self.answers.values()), "scores": scores}


def contests(rows: Iterable[Row], config: EloConfig) -> Iterator[Contest]:
    """Gather pairs by their prompt, in the order in which prompts come; equal sides are left out.

    Raises:
        DataError: A row says something else than a number of wins, or has images.
    """
    found: dict[bytes, Contest] = {}
    for number, row in enumerate(rows, 1):
        if any(row.get(name) for name in IMAGES):
            raise DataError("answers to prompts with images are not rated here", where=f"row {number}")
        count = _wins(row, config.wins_column, number)
        if not count or row["chosen"] == row["rejected"]:
            continue
        rest = {name: row[name] for name in BESIDE if name in row}
        found.setdefault(canonical(rest), Contest(rest)).add(row, count)
    yield from found.values()


def _wins(row: Row, column: str | None, number: int) -> float:
    if column is None:
        return 1.0
    if weight_problem(row, column) is None:
        return float(row[column])
    raise DataError(
        f"the column `{column}` says how often the chosen answer has won",
        where=f"row {number}",
        found=repr(row.get(column)),
        expected="a finite number of at least 0",
    )


def run(context: StageContext) -> Outcome:
    """Rate the answers and write them.

    Raises:
        DataError: There is no pair of different answers.
    """
    data = context.input("data")
    found = list(contests(stream_rows(data), context.config))
    if not found:
        raise DataError(
            "there is no pair to rate answers by", found=f"{data.facts.rows} rows of equal answers"
        )
    facts = write_rows(
        context.output("data"),
        (contest.row(context.config) for contest in found),
        "ranked",
        policy=data.facts.policy,
    )
    context.describe("data", Kind.DATASET, facts)
    answers = sum(len(contest.answers) for contest in found)
    pairs = sum(contest.wins.total() for contest in found)
    figures = {"prompts": float(len(found)), "answers": float(answers), "wins": float(pairs)}
    return Outcome(
        figures=figures, summary=f"{answers} answers to {len(found)} prompts rated by {pairs:g} wins"
    )
