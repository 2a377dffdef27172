"""Running the target of a stage without a worker, its options validated as the planner does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from helpers.models import as_artifact

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import Level, Outcome, Stage, StageContext
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import resolve, validate_config
from posttrain.registry.discovery import discover


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    return discover()


def configured(stage: Stage, **options: Any) -> Any:
    return validate_config(stage.config, options, catalogue())


class StageRun(StageContext):
    """A finished run: the outcome, what was described and what was noted."""

    def __init__(self, directory: Path, config: Any, inputs: Mapping[str, Sequence[Artifact]]) -> None:
        self.node, self.config, self.inputs, self.base = "node", config, inputs, directory
        self.directory, self.work, self.workspace = directory, directory / "work", directory / ".posttrain"
        self.outcome: Outcome | None = None
        self.described: dict[str, tuple[Kind, Any]] = {}
        self.notes: list[str] = []

    def input(self, port: str) -> Artifact:
        (artifact,) = self.inputs[port]
        return artifact

    def output(self, port: str) -> Path:
        path = self.directory / f"out-{port}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        assert port not in self.described
        self.described[port] = (kind, facts)

    def component(self, choice: Choice, group: str) -> Component:
        return resolve(choice, Group(group), catalogue())

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        self.notes.append(message)

    def result(self, port: str) -> Artifact:
        kind, facts = self.described[port]
        return as_artifact(self.output(port), facts, kind)


def run_stage(
    stage: Stage, directory: Path, inputs: Mapping[str, Sequence[Artifact]] | None = None, **options: Any
) -> StageRun:
    """Run a stage in `directory`, which relative sources are resolved against too."""
    run = StageRun(directory, configured(stage, **options), inputs or {})
    directory.mkdir(parents=True, exist_ok=True)
    run.work.mkdir(exist_ok=True)
    run.outcome = load_target(stage.target)(run)
    assert set(run.described) == {port.name for port in stage.outputs(run.config)}
    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
