"""The stage `data.dedup`: equal and nearly equal rows are left out but for one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from posttrain.artifacts.kinds import Kind, ReportFacts
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
from posttrain_plugins.data.derivation import expected, write_derived
from posttrain_plugins.data.formats import FORMATS
from posttrain_plugins.data.reports import write_report
from posttrain_plugins.data.rows import SHARED, stream_rows
from posttrain_plugins.data.similarity.duplicates import LIBRARY, Bands, Copy, Rule, find_copies
from posttrain_plugins.data.similarity.shingles import content_of
from posttrain_plugins.stopping import pauses

CLUSTERS = "clusters.jsonl"

_EXAMPLES = 10
_COPIES_SHOWN = 2
_SHOWN = 160

Row = dict[str, Any]
Read = Callable[[], Iterable[Row]]


class DedupConfig(StageConfig):
    """What makes rows copies of each other."""

    on: str = Field(
        default="row",
        description="what is compared: the `row`, in all that its format reads; its `prompt`; or one column",
    )
    normalize: bool = Field(
        default=True, description="rows that differ in case and white space alone are equal"
    )
    near: bool = Field(default=True, description="find nearly equal rows too, not just equal ones")
    threshold: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="least Jaccard similarity of the shingles of near copies, in each part of a row",
    )
    shingles: Literal["words", "characters"] = Field(
        default="words",
        description="what near copies have in common: runs of words, or of characters, which suit short texts",
    )
    size: int = Field(
        default=5, ge=1, le=100, description="length of a shingle; a shorter text is a single one"
    )
    permutations: int = Field(
        default=128, ge=16, le=4096, description="hash functions; more of them tell similar rows apart faster"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="which hash functions")

    def rule(self) -> Rule:
        """Return the options as `find_copies` takes them."""
        return Rule(
            on=self.on,
            fold=self.normalize,
            threshold=self.threshold if self.near else None,
            characters=self.shingles == "characters",
            size=self.size,
            permutations=self.permutations,
            seed=self.seed,
        )


class Dedup(Stage):
    """Keep one of each set of equal or nearly equal rows: the one whose content hashes lowest."""

    config = DedupConfig
    shared = SHARED
    inputs = (Port("data", frozenset({Kind.DATASET}), formats=frozenset(FORMATS)),)
    target = "posttrain_plugins.data.dedup:run"

    def outputs(self, config: DedupConfig) -> tuple[Port, ...]:
        """The rows that are left, and the report."""
        return (
            Port("data", frozenset({Kind.DATASET}), frozenset(FORMATS)),
            Port("report", frozenset({Kind.REPORT})),
        )

    def predict(self, config: DedupConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """The rows are like those that come in."""
        return {
            "data": Prediction(Kind.DATASET, expected(inputs["data"][0])),
            "report": Prediction(Kind.REPORT, ReportFacts(report="deduplication")),
        }

    def check(self, config: DedupConfig, inputs: Inputs) -> Iterable[Finding]:
        """Say early that a library or permutations are missing."""
        if not config.near:
            return
        if importlib.util.find_spec(LIBRARY) is None:
            message = f"near copies are found with `{LIBRARY}`, which is not installed here"
            fix = f"install {LIBRARY}, or set `near: false`"
            yield Finding("dedup", Level.WARNING, Certainty.VERIFIED, message, fix=fix)
        try:
            Bands.of(config.threshold, config.permutations)
        except DataError as error:
            message = f"{error.message}: {error.found}"
            yield Finding("dedup", Level.ERROR, Certainty.VERIFIED, message, fix=error.fix)


@dataclass(frozen=True)
class Cluster:
    """A row that is kept and its copies, with their places from 0."""

    kept: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Found:
    """What was found in a dataset.

    Args:
        rows: How many rows it has.
        copies: Those that are left out.
    """

    rows: int
    copies: tuple[Copy, ...]

    @property
    def clusters(self) -> list[Cluster]:
        """The rows with copies, those with most copies first."""
        grouped: dict[int, list[Copy]] = {}
        for copy in self.copies:
            grouped.setdefault(copy.of, []).append(copy)
        found = [Cluster(kept, tuple(copies)) for kept, copies in grouped.items()]
        return sorted(found, key=lambda cluster: (-len(cluster.copies), cluster.kept))

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""
        equal = sum(copy.equal for copy in self.copies)
        return {
            "rows": float(self.rows),
            "kept": float(self.rows - len(self.copies)),
            "equal": float(equal),
            "near": float(len(self.copies) - equal),
            "duplicate_rate": len(self.copies) / self.rows if self.rows else 0.0,
            "clusters": float(len({copy.of for copy in self.copies})),
        }

    def kept(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Return those of all rows that are kept."""
        dropped = {copy.row for copy in self.copies}
        return (row for place, row in enumerate(rows) if place not in dropped)

    def summary(self) -> str:
        """Return one line for people."""
        figures = self.figures()
        return "{rows:.0f} rows, {kept:.0f} kept: {equal:.0f} equal and {near:.0f} near copies".format(
            **figures
        )


def find(
    read: Read, format: str, config: DedupConfig, progress: Callable[[int], None] = lambda done: None
) -> Found:
    """Find the copies among rows.

    Raises:
        DataError: A row lacks the column that is compared, or there are no rows.
    """
    count = 0

    def counted(done: int) -> None:
        nonlocal count
        count = done
        progress(done)

    copies = find_copies(read(), format, config.rule(), counted)
    if not count:
        raise DataError("there are no rows to compare", found="no rows")
    return Found(count, tuple(copies))


def report_of(found: Found, read: Read, format: str, config: DedupConfig) -> dict[str, Any]:
    """Return the report: figures, options, and the largest clusters with the beginning of their texts."""
    shown = found.clusters[:_EXAMPLES]
    wanted = {place for each in shown for place in (each.kept, *_copies_shown(each))}
    texts = _excerpts(read(), wanted, format, config.on)
    examples = [
        {
            "kept": {"row": each.kept + 1, "text": texts[each.kept]},
            "copies": [{"row": place + 1, "text": texts[place]} for place in _copies_shown(each)],
            "size": len(each.copies) + 1,
        }
        for each in shown
    ]
    return {"figures": found.figures(), "options": config.model_dump(mode="json"), "examples": examples}


def cluster_lines(clusters: Sequence[Cluster]) -> Iterator[dict[str, Any]]:
    """Return one JSON object for each cluster; rows are numbered from 1."""
    for cluster in clusters:
        copies = [{**asdict(copy), "row": copy.row + 1} for copy in cluster.copies]
        for copy in copies:
            del copy["of"]
        yield {"kept": cluster.kept + 1, "copies": copies}


def run(context: StageContext) -> Outcome:
    """Write the rows that are left and the report."""
    config: DedupConfig = context.config
    data, pause = context.input("data"), pauses(context, "rows", "looking for copies")
    total = data.facts.rows
    found = find(
        lambda: stream_rows(data),
        data.facts.format,
        config,
        lambda done: pause(done, total),
    )
    facts = write_derived(context.output("data"), found.kept(stream_rows(data)), data)
    context.describe("data", Kind.DATASET, facts)
    report = report_of(found, lambda: stream_rows(data), data.facts.format, config)
    write_report(
        context.output("report"), {"data": data.digest, **report}, CLUSTERS, cluster_lines(found.clusters)
    )
    figures = found.figures()
    context.describe("report", Kind.REPORT, ReportFacts(report="deduplication", figures=figures))
    return Outcome(figures=figures, summary=found.summary())


def _copies_shown(cluster: Cluster) -> list[int]:
    return [copy.row for copy in islice(cluster.copies, _COPIES_SHOWN)]


def _excerpts(rows: Iterable[Row], wanted: set[int], format: str, on: str) -> dict[int, str]:
    found = {}
    for place, row in enumerate(rows):
        if place in wanted:
            texts = content_of(row, format, on).texts
            text = " | ".join(" ".join(" ".join(each).split()) for each in texts.values())
            found[place] = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    return found
