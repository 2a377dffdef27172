"""A stage context without a worker, and small training runs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.models import as_artifact, save_tiny_model

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Trainer
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.losses.nll import Nll
from posttrain_plugins.losses.sigmoid import Sigmoid
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.sft import Sft

LOSSES: dict[str, Any] = {"nll": Nll, "sigmoid": Sigmoid}
TRAINERS: dict[str, type[Trainer]] = {"train.sft": Sft, "train.dpo": Dpo}


class Context(StageContext):
    """Keeps what a stage says. `stop_at` asks it to stop once that step is reported as done."""

    def __init__(
        self, directory: Path, stage: Trainer, config: Any, inputs: Mapping[str, Sequence[Artifact]]
    ) -> None:
        self.node, self.stage, self.config, self.inputs = "train", stage, config, inputs
        self.work, self.base, self.workspace = directory / "work", directory, directory / ".posttrain"
        self.work.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Artifact] = {}
        self.described: dict[str, tuple[Kind, Any]] = {}
        self.seen_metrics: dict[int, dict[str, float]] = {}
        self.seen_progress: list[tuple[int, int | None, str]] = []
        self.notes: list[str] = []
        self.stop_at: int | None = None
        self.on_progress: Callable[[int, str], None] = lambda done, unit: None
        self._outputs = directory

    def input(self, port: str) -> Artifact:
        (artifact,) = self.inputs[port]
        return artifact

    def output(self, port: str) -> Path:
        path = self._outputs / f"out-{port}"
        path.mkdir(exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        self.described[port] = (kind, facts)

    def component(self, choice: Choice, group: str) -> Component:
        plugin = LOSSES[choice.name]()
        return Component(choice.name, plugin, plugin.config(**choice.options))

    def artifact(self, digest: str) -> Artifact:
        return self.known[digest]

    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.seen_progress.append((done, total, unit))
        self.on_progress(done, unit)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.seen_metrics[step] = dict(values)

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        self.notes.append(message)

    @property
    def stopping(self) -> bool:
        steps = [done for done, _, unit in self.seen_progress if unit == "steps"]
        return self.stop_at is not None and bool(steps) and steps[-1] >= self.stop_at

    @property
    def losses(self) -> list[float]:
        return [values["loss"] for _, values in sorted(self.seen_metrics.items())]


def model_artifact(directory: Path, **options: Any) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, save_tiny_model(directory, **options))


def dataset_artifact(directory: Path, rows: Sequence[Mapping[str, Any]], format: str) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, write_rows(directory, rows, format), Kind.DATASET)


def completion_rows(count: int = 10) -> list[dict[str, Any]]:
    """Answers of ragged lengths, from one to many tokens."""
    return [{"prompt": f"say {i}:", "completion": "ab" * (1 + i * 3 % 8) + str(i)} for i in range(count)]


def preference_rows(count: int = 6) -> list[dict[str, Any]]:
    return [
        {"prompt": f"q{i}", "chosen": "yes" * (1 + i % 4), "rejected": "no" * (1 + i * 5 % 7)}
        for i in range(count)
    ]


def context_for(
    directory: Path,
    uses: str,
    model: Artifact,
    rows: Sequence[Mapping[str, Any]],
    format: str,
    **options: Any,
) -> Context:
    """A context for one training; the same directory again resumes it."""
    data = dataset_artifact(directory / "data", rows, format)
    stage = TRAINERS[uses]()
    config = stage.config(**{"logging_steps": 1, "learning_rate": 1e-2, **options})
    return Context(directory, stage, config, {"model": [model], "data": [data]})


def train(context: Context) -> Outcome:
    from posttrain_plugins.training.stage import run

    return run(context)


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = path.glob("*.safetensors")
    return load_file(file)
