"""The stage `data.validate`: a report of everything that is wrong or odd with the rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from posttrain.artifacts.kinds import Kind, ReportFacts
from posttrain.contracts.stage import (
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
from posttrain_plugins.data.formats import FORMATS, format_of
from posttrain_plugins.data.formats.values import counted
from posttrain_plugins.data.judging.checks import CHECKS, Check, longer_than, weights_in
from posttrain_plugins.data.judging.validation import Report, inspect
from posttrain_plugins.data.reports import write_report
from posttrain_plugins.data.rows import stream_rows
from posttrain_plugins.stopping import pauses

PROBLEMS = "problems.jsonl"
REPORT = "validation"


class ValidateConfig(StageConfig):
    """What to look for, and what is too bad to go on with."""

    max_characters: PositiveInt = Field(
        default=200_000, description="characters of a row that is not too long"
    )
    weight_column: str | None = Field(
        default=None,
        description="the column with the rows' weights, as a trainer's `weight_column`; unset, numbers in a column "
        "`weight` are looked at",
    )
    ignore: tuple[str, ...] = Field(
        default=(), description="checks to leave out, such as `edge-space`; the report names them"
    )
    refuse: Literal["error", "warning", "nothing"] = Field(
        default="error", description="the least kind of problem that makes the stage fail"
    )

    @field_validator("ignore")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = (*CHECKS, TOO_LONG, WEIGHTS)
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(known)}")
        return value


TOO_LONG, WEIGHTS = "too-long", "weights"
_REFUSED: Mapping[str, tuple[Level, ...]] = {
    "error": (Level.ERROR,),
    "warning": (Level.ERROR, Level.WARNING),
    "nothing": (),
}


class Validate(Stage):
    """Look at every row of a dataset."""

    config = ValidateConfig
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)
    target = "posttrain_plugins.data.validate:run"
    tiny = {"refuse": "nothing"}

    def outputs(self, config: ValidateConfig) -> tuple[Port, ...]:
        """The report."""
        return (Port("report", frozenset({Kind.REPORT})),)

    def predict(self, config: ValidateConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """A report."""
        return {"report": Prediction(Kind.REPORT, ReportFacts(report=REPORT))}


def checks_of(config: ValidateConfig) -> dict[str, Check]:
    """Return the checks that the options ask for."""
    asked = {TOO_LONG: longer_than(config.max_characters), WEIGHTS: weights_in(config.weight_column)}
    checks = {**CHECKS, **asked}
    return {code: check for code, check in checks.items() if code not in config.ignore}


def refused(report: Report, config: ValidateConfig) -> bool:
    """Whether the options call what was found too bad."""
    return any(problem.level in _REFUSED[config.refuse] for problem in report.problems)


def run(context: StageContext) -> Outcome:
    """Look at every row and write the report, or refuse the data."""
    config: ValidateConfig = context.config
    data = context.input("data")
    name = str(data.facts.format)
    entries = ((f"row {number}", row) for number, row in enumerate(_told(context, data), 1))
    report = inspect(entries, format_of(name), name, checks_of(config))
    if refused(report, config):
        lines = [
            f"{counted(each.count, 'row')}: {each.title}, such as {_example(each)}"
            for each in report.problems
        ]
        raise DataError(
            report.summary(),
            where=data.ref,
            found="\n    ".join(["", *lines]),
            fix="see `ignore` and `refuse`",
        )
    write_report(
        context.output("report"),
        {"data": data.digest, **report.as_dict()},
        PROBLEMS,
        (problem.as_dict() for problem in report.problems),
    )
    context.describe("report", Kind.REPORT, ReportFacts(report=REPORT, figures=report.figures()))
    for problem in report.problems:
        context.note(f"{counted(problem.count, 'row')}: {problem.title}", problem.level)
    return Outcome(figures=report.figures(), summary=report.summary())


def _told(context: StageContext, data: Any) -> Iterator[dict[str, Any]]:
    pause = pauses(context, "rows", "the validation")
    for number, row in enumerate(stream_rows(data)):
        if number % 1000 == 0:
            pause(number, data.facts.rows)
        yield row


def _example(problem: Any) -> str:
    return ": ".join(problem.examples[0]) if problem.examples else problem.code
