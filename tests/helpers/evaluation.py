"""A stage context without a worker for stages that read policies, and tiny reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.contexts import FakeContext
from helpers.models import as_artifact

from posttrain.artifacts.kinds import Kind, PolicyFacts, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.evaluation.report import Item, Metric, write_report


class Context(FakeContext):
    """A context for stages that read policies; `rewards` are the components its options may name."""

    def __init__(
        self,
        directory: Path,
        config: Any,
        inputs: Mapping[str, Sequence[Artifact]],
        rewards: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, None, config, inputs, rewards)


def dataset(directory: Path, rows: Sequence[Mapping[str, Any]], format: str) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, write_rows(directory, rows, format), Kind.DATASET)


def model(name: str) -> Artifact:
    """A model without files, for stages that only look at digests; `name` makes its digest its own."""
    return as_artifact(Path(name), PolicyFacts(architecture=name))


def answers(model: Artifact, correct: Sequence[bool], **changes: Any) -> list[Item]:
    """One finished item per answer, on rows named r0, r1 …"""
    return [
        Item(
            **{
                "model": model.digest, "row": f"r{i}", "prompt": f"p{i}", "prediction": "a" if right else "b",
                "target": "a", "correct": right, "finished": True, "generated": 1, **changes,
            }
        )
        for i, right in enumerate(correct)
    ]  # fmt: skip


def likelihoods(model: Artifact, nlls: Sequence[float], tokens: Sequence[int]) -> list[Item]:
    return [
        Item(model=model.digest, row=f"r{i}", prompt=f"p{i}", nll=nll, tokens=count)
        for i, (nll, count) in enumerate(zip(nlls, tokens, strict=True))
    ]


def report(directory: Path, items: Sequence[Item], metric: Metric = Metric.EXACT_MATCH) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    figures = write_report(directory, items, [metric], "data")
    return as_artifact(directory, ReportFacts(report="evaluation", subjects=tuple(figures)), Kind.REPORT)
