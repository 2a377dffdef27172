"""A stage context without a worker for stages that read policies, and tiny reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.models import as_artifact

from posttrain.artifacts.kinds import Kind, PolicyFacts, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.stage import Level, StageContext
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.evaluation.report import Item, Metric, write_report


class Context(StageContext):
    """Keeps what a stage says; `rewards` are the components its options may name."""

    def __init__(
        self,
        directory: Path,
        config: Any,
        inputs: Mapping[str, Sequence[Artifact]],
        rewards: Mapping[str, Any] | None = None,
    ) -> None:
        self.node, self.config, self.inputs = "node", config, inputs
        self.work = self.base = self.workspace = directory
        self.described: dict[str, tuple[Kind, Any]] = {}
        self.notes: list[tuple[Level, str]] = []
        self.seen_progress: list[tuple[int, int | None]] = []
        self.stop = False
        self._directory, self._rewards = directory, rewards or {}

    def input(self, port: str) -> Artifact:
        (artifact,) = self.inputs[port]
        return artifact

    def output(self, port: str) -> Path:
        path = self._directory / f"out-{port}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        assert port not in self.described
        self.described[port] = (kind, facts)

    def component(self, choice: Choice, group: str) -> Component:
        plugin = self._rewards[choice.name]
        plugin = plugin() if isinstance(plugin, type) else plugin
        return Component(choice.name, plugin, plugin.config(**choice.options))

    def artifact(self, digest: str) -> Artifact:
        raise AssertionError(f"nothing here looks up {digest}")

    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.seen_progress.append((done, total))

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        self.notes.append((level, message))

    @property
    def stopping(self) -> bool:
        return self.stop


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
