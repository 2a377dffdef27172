"""The stage context without a worker that tests of stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from helpers.models import as_artifact

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Level, Stage, StageContext
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import resolve, validate_config
from posttrain.registry.discovery import discover


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    return discover()


def configured(stage: Stage, **options: Any) -> Any:
    """Validate options as the planner does it."""
    return validate_config(stage.config, options, catalogue())


class FakeContext(StageContext):
    """Keeps what a stage says.

    Args:
        directory: Outputs, scratch and relative sources live here; the same one again is a resume.
        stage: The plugin that runs.
        config: Its validated options.
        inputs: Artifacts by port.
        components: Components by name, in place of those that the registry has.

    Attributes:
        known: What the store has, by digest.
        stop: Whether the stage is asked to stop.
        stop_at: Ask it to stop once this optimizer step is reported as done.
        on_progress: Called with (done, unit); may raise.
    """

    def __init__(
        self,
        directory: Path,
        stage: Any,
        config: Any,
        inputs: Mapping[str, Sequence[Artifact]],
        components: Mapping[str, Any] | None = None,
    ) -> None:
        self.node, self.stage, self.config, self.inputs = "node", stage, config, inputs
        self.directory, self.base = directory, directory
        self.work, self.workspace = directory / "work", directory / ".posttrain"
        self.work.mkdir(parents=True, exist_ok=True)
        self.components = dict(components or {})
        self.known: dict[str, Artifact] = {}
        self.described: dict[str, tuple[Kind, Any]] = {}
        self.seen_metrics: dict[int, dict[str, float]] = {}
        self.seen_progress: list[tuple[int, int | None, str]] = []
        self.seen_tables: dict[str, dict[int, list[dict[str, Any]]]] = {}
        self.said: list[tuple[Level, str]] = []
        self.stop = False
        self.stop_at: int | None = None
        self.on_progress: Callable[[int, str], None] = lambda done, unit: None

    def input(self, port: str) -> Artifact:
        (artifact,) = self.inputs[port]
        return artifact

    def output(self, port: str) -> Path:
        path = self.directory / f"out-{port}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        assert port not in self.described, f"{port} is described twice"
        self.described[port] = (kind, facts)

    def component(self, choice: Choice, group: str) -> Component:
        if choice.name not in self.components:
            return resolve(choice, Group(group), catalogue())
        plugin = self.components[choice.name]
        plugin = plugin() if isinstance(plugin, type) else plugin
        return Component(choice.name, plugin, plugin.config(**choice.options))

    def artifact(self, digest: str) -> Artifact:
        given = {each.digest: each for several in self.inputs.values() for each in several}
        return {**given, **self.known}[digest]

    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.seen_progress.append((done, total, unit))
        self.on_progress(done, unit)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.seen_metrics.setdefault(step, {}).update(values)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.seen_tables.setdefault(name, {})[step] = [dict(row) for row in rows]

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        self.said.append((level, message))

    @property
    def stopping(self) -> bool:
        steps = [done for done, _, unit in self.seen_progress if unit == "steps"]
        return self.stop or (self.stop_at is not None and bool(steps) and steps[-1] >= self.stop_at)

    @property
    def notes(self) -> list[str]:
        return [message for _, message in self.said]

    @property
    def warnings(self) -> list[str]:
        return [message for level, message in self.said if level is not Level.NOTE]

    @property
    def losses(self) -> list[float]:
        return [values["loss"] for _, values in sorted(self.seen_metrics.items()) if "loss" in values]

    def result(self, port: str) -> Artifact:
        kind, facts = self.described[port]
        return as_artifact(self.output(port), facts, kind)
