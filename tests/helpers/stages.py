"""Running the target of a stage without a worker, its options validated as the planner does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.contexts import FakeContext, catalogue, configured

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import load_target
from posttrain.contracts.stage import Outcome, Stage

__all__ = ["StageRun", "catalogue", "configured", "contents", "run_stage"]


class StageRun(FakeContext):
    """A finished run: the outcome, what was described and what was noted."""

    outcome: Outcome | None = None


def run_stage(
    stage: Stage, directory: Path, inputs: Mapping[str, Sequence[Artifact]] | None = None, **options: Any
) -> StageRun:
    """Run a stage in `directory`, which relative sources are resolved against too."""
    run = StageRun(directory, stage, configured(stage, **options), inputs or {})
    run.outcome = load_target(stage.target)(run)
    assert set(run.described) == {port.name for port in stage.outputs(run.config)}
    return run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
