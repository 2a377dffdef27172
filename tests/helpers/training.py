"""A stage context without a worker, and small training runs in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext as Context
from helpers.contexts import catalogue, configured
from helpers.models import as_artifact, save_tiny_model

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Outcome
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.testing.rows import ROWS as ROWS
from posttrain_plugins.testing.rows import completion_rows as completion_rows
from posttrain_plugins.testing.rows import preference_rows as preference_rows
from posttrain_plugins.testing.rows import three_way_rows as three_way_rows
from posttrain_plugins.testing.rows import unpaired_rows as unpaired_rows


def fitting_losses(uses: str) -> list[str]:
    """Name the registered losses that a trainer's option `loss` takes."""
    having = next(
        mark.having
        for mark in catalogue().stage(uses).config.model_fields["loss"].metadata
        if isinstance(mark, Uses)
    )
    losses = {name: catalogue().load(Group.LOSS, name) for name in catalogue().names(Group.LOSS)}
    return [
        name for name, loss in losses.items() if all(getattr(loss, key) == value for key, value in having)
    ]


def default_loss(uses: str) -> str:
    name: str = catalogue().stage(uses).config.model_fields["loss"].default.name
    return name


def tried_once(fitting: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Pair every trainer with its default loss, and any other loss with the first trainer of its family that fits."""
    found: list[tuple[str, str]] = []
    tried: set[tuple[str, str]] = set()
    for uses, losses in fitting.items():
        stage = catalogue().stage(uses)
        for loss in losses:
            if loss == default_loss(uses) or (stage.family, loss) not in tried:
                found.append((uses, loss))
                tried.add((stage.family, loss))
    return found


TRAININGS = tried_once({uses: fitting_losses(uses) for uses in catalogue().names(Group.TRAINER)})
"""Every registered trainer and every loss: a new plugin is tested when it arrives."""


def often(trainings: Sequence[tuple[str, str]]) -> list[Any]:
    """Mark all as slow but each trainer with its default loss: the losses of every kind stand for the others."""
    return [
        pair if pair[1] == default_loss(pair[0]) else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in trainings
    ]


def model_artifact(directory: Path, **options: Any) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, save_tiny_model(directory, **options))


def dataset_artifact(directory: Path, rows: Sequence[Mapping[str, Any]], format: str) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, write_rows(directory, rows, format), Kind.DATASET)


def format_of(uses: str) -> str:
    """Choose the first format that a trainer takes."""
    return next(format for format in ROWS if format in catalogue().stage(uses).formats)


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
    stage = catalogue().stage(uses)
    config = configured(stage, **{"logging_steps": 1, "learning_rate": 1e-2, **options})
    return Context(directory, stage, config, {"model": [model], "data": [data]})


def train(context: Context) -> Outcome:
    from posttrain_plugins.training.ranks import run

    return run(context)


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = path.glob("*.safetensors")
    return load_file(file)
