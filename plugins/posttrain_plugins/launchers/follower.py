"""What the target of a stage is given on every rank but the first: it computes along and tells nobody."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Choice, Component
from posttrain.contracts.stage import Cell, Level, StageContext


class FollowerContext(StageContext):
    """A stage context that reads what rank 0's reads and whose outputs are thrown away.

    Args:
        leader: The context of rank 0.
        directory: Where outputs go.
    """

    def __init__(self, leader: StageContext, directory: Path) -> None:
        self._leader, self._directory = leader, directory
        self.node, self.stage, self.config = leader.node, leader.stage, leader.config
        self.work, self.base, self.workspace = leader.work, leader.base, leader.workspace
        self.inputs = leader.inputs

    def input(self, port: str) -> Artifact:
        """Return the single artifact of an input port."""
        return self._leader.input(port)

    def output(self, port: str) -> Path:
        """Return a directory that nobody looks at."""
        path = self._directory / port
        path.mkdir(parents=True, exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        """Rank 0 does it."""

    def component(self, choice: Choice, group: str) -> Component:
        """Load the component a config field names."""
        return self._leader.component(choice, group)

    def artifact(self, digest: str) -> Artifact:
        """Look an artifact up in the store."""
        return self._leader.artifact(digest)

    def secret(self, reference: str) -> str:
        """Resolve a declared `env:NAME`."""
        return self._leader.secret(reference)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Rank 0 does it."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Rank 0 does it."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Rank 0 does it."""

    def note(self, message: str, level: Level = Level.NOTE) -> None:
        """Rank 0 does it."""

    @property
    def stopping(self) -> bool:
        """Rank 0 is asked, and tells the others."""
        return False

    def discard(self) -> None:
        """Remove the outputs."""
        shutil.rmtree(self._directory, ignore_errors=True)
