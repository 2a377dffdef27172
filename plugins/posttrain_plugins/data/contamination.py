"""The stage `data.contamination`: evaluation rows that occur in training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.artifacts.kinds import Kind, ReportFacts
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
    Verdict,
)
from posttrain.errors import DataError
from posttrain_plugins.data.derivation import expected, write_derived
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.reports import write_report
from posttrain_plugins.data.rows import SHARED, stream_rows
from posttrain_plugins.data.similarity.exposure import Exposure, RowSet, exposures
from posttrain_plugins.data.similarity.overlap import Measure
from posttrain_plugins.stopping import pauses

HITS = "hits.jsonl"

_SHORT = 8
_DATASET = frozenset({Kind.DATASET})


class ContaminationConfig(StageConfig):
    """What counts as contamination."""

    ngram: int = Field(
        default=13,
        ge=1,
        le=1000,
        description="consecutive words that an evaluation row and a training row have in common",
    )
    coverage: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="least share of an evaluation row's words in such runs of one training row; 0 is any run",
    )
    shortest: PositiveInt = Field(
        default=5,
        description="evaluation rows with fewer words have to be all that a training row asks; those with fewer "
        "than `ngram` have to occur in one as a whole",
    )
    common: PositiveInt | None = Field(
        default=10,
        description="runs that more rows than this of one evaluation set have are its template, and count for "
        "nothing",
    )
    on: str = Field(
        default="prompt",
        description="what is looked for: the `prompt` without system turns, the `row`, or one column",
    )
    max_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="with more contaminated rows in any evaluation set, what follows is not run",
    )
    remove: bool = Field(
        default=False, description="put out the rows of the only training set that overlap none, as `clean`"
    )

    @model_validator(mode="after")
    def _shorter(self) -> Self:
        if self.shortest > self.ngram:
            raise ValueError(
                f"`shortest` {self.shortest} is above `ngram` {self.ngram}; give at most as many words"
            )
        return self

    def measure(self) -> Measure:
        """Return the options as the index takes them."""
        return Measure(self.ngram, self.coverage, self.shortest, self.common, self.on)


class Contamination(Stage):
    """Look for the rows of every evaluation set in every training set."""

    config = ContaminationConfig
    shared = SHARED
    inputs = (
        Port("train", _DATASET, formats=frozenset(FORMATS), many=True),
        Port("evaluation", _DATASET, formats=frozenset(FORMATS), many=True),
    )
    target = "posttrain_plugins.data.contamination:run"

    def outputs(self, config: ContaminationConfig) -> tuple[Port, ...]:
        """The report and, on demand, what is left of the training set."""
        report = Port("report", frozenset({Kind.REPORT}))
        return (report, Port("clean", _DATASET, frozenset(FORMATS))) if config.remove else (report,)

    def predict(self, config: ContaminationConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The rows that are left are like those that come in."""
        report = Prediction(Kind.REPORT, ReportFacts(report="contamination"))
        if not config.remove:
            return {"report": report}
        return {"report": report, "clean": Prediction(Kind.DATASET, expected(inputs["train"][0]))}

    def check(self, config: ContaminationConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report `remove` with several training sets, and a dataset that is compared with itself."""
        train, evaluation = inputs.get("train", ()), inputs.get("evaluation", ())
        if config.remove and len(train) > 1:
            yield _error(
                f"`remove` cleans one training set, but there are {len(train)}",
                "use a stage for each of them",
            )
        for origin in sorted({each.origin for each in train} & {each.origin for each in evaluation}):
            yield _error(
                f"{origin} is a training set and an evaluation set", "connect each to one port alone"
            )


def run(context: StageContext) -> Outcome:
    """Compare all with all; write the report and, on demand, the rows that are left."""
    config: ContaminationConfig = context.config
    training = [_rows(artifact) for artifact in _distinct(context.inputs["train"])]
    evaluation = [_rows(artifact) for artifact in _distinct(context.inputs["evaluation"])]
    total = sum(artifact.facts.rows or 0 for artifact in _distinct(context.inputs["train"]))
    pause = pauses(context, "rows", "the comparison")
    found = exposures(training, evaluation, config.measure(), lambda done: pause(done, total))
    figures = named_figures(found)
    write_report(context.output("report"), report_of(found, config), HITS, hits_of(found))
    context.describe("report", Kind.REPORT, ReportFacts(report="contamination", figures=figures))
    if config.remove:
        figures["removed"] = float(_write_clean(context, found))
    for each in found.evaluations:
        if each.unjudged:
            context.note(unjudged(each.name, each.unjudged), Level.WARNING)
    over = config.max_share is not None and found.worst > config.max_share
    verdict = Verdict.REJECTED if over else Verdict.COMPLETED
    return Outcome(verdict=verdict, figures=figures, summary=summary(found, config.max_share))


def _write_clean(context: StageContext, found: Exposure) -> int:
    """Write what is left of the training set and return how many rows are gone."""
    (source, *others) = _distinct(context.inputs["train"])
    if others:
        raise DataError(
            "`remove` cleans one training set",
            where=context.node,
            found=f"{len(others) + 1} training sets",
            fix="use a stage for each of them",
        )
    gone = found.overlapping[0]
    rows = (row for place, row in enumerate(stream_rows(source)) if place not in gone)
    if len(gone) == found.trained[0]:
        raise DataError(
            "every training row overlaps an evaluation row, so that nothing is left",
            where=source.ref,
            found=f"{len(gone)} rows",
            fix="look at the report without `remove`; a larger `ngram` or `coverage` finds less",
        )
    context.describe("clean", Kind.DATASET, write_derived(context.output("clean"), rows, source))
    return len(gone)


def report_of(found: Exposure, config: ContaminationConfig) -> dict[str, Any]:
    """Return the report without its hits: rows and shares by evaluation set and training set."""
    return {
        "options": config.model_dump(mode="json"),
        "training": dict(zip(found.names, found.trained, strict=True)),
        "overlapping": {name: len(rows) for name, rows in zip(found.names, found.overlapping, strict=True)},
        "evaluations": {each.name: each.as_dict(found.names) for each in found.evaluations},
        "worst": found.worst,
    }


def hits_of(found: Exposure) -> Iterator[dict[str, Any]]:
    """Return an object for each evaluation row and training set that has it; rows are numbered from 1."""
    for each in found.evaluations:
        for (row, place), hit in sorted(each.hits.items()):
            yield {
                "evaluation": each.name,
                "row": row + 1,
                "dataset": found.names[place],
                "training_row": hit.row + 1,
                "training_rows": hit.rows,
                "longest": hit.longest,
                "coverage": round(hit.coverage, 6),
                "text": hit.text,
            }


def named_figures(found: Exposure) -> dict[str, float]:
    """Return the figures: the worst share as `contaminated`, and each evaluation's where there are several."""
    figures = {"contaminated": found.worst, "rows": float(sum(each.rows for each in found.evaluations))}
    figures["contaminated_rows"] = float(sum(len(each.contaminated) for each in found.evaluations))
    if len(found.evaluations) > 1:
        for each in found.evaluations:
            figures[f"contaminated[{each.short}]"] = each.share
    return figures


def summary(found: Exposure, most: float | None) -> str:
    """Return one line for people."""
    told = ", ".join(
        f"{len(each.contaminated)} of {each.rows} rows of {each.name} ({each.share:.2%})"
        for each in found.evaluations
    )
    over = f"; more than {most:.2%}" if most is not None and found.worst > most else ""
    return f"in training data: {told}{over}"


def unjudged(name: str, rows: int) -> str:
    """Say that some rows could be compared as a whole alone."""
    return (
        f"{rows} rows of {name} are too short, or too alike, for runs of words; they count only where a training "
        "row asks just the same"
    )


def _distinct(artifacts: Sequence[Artifact]) -> list[Artifact]:
    return list({artifact.digest: artifact for artifact in artifacts}.values())


def _rows(artifact: Artifact) -> RowSet:
    read = partial(stream_rows, artifact)
    return RowSet(artifact.ref, str(artifact.facts.format), read, artifact.digest[:_SHORT])


def _error(message: str, fix: str) -> Finding:
    return Finding("contamination", Level.ERROR, Certainty.PREDICTED, message, fix=fix)
