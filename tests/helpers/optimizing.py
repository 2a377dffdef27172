"""Trainings of a few steps whose weights are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.training import (
    Context,
    completion_rows,
    context_for,
    weights,
)

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.trainers.sft import SftOptions

BASE: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-3, "max_steps": 3, "save_steps": 0}


def sft(
    directory: Path, model: Artifact, rows: list[dict[str, Any]] | None = None, **options: Any
) -> Context:
    rows = rows or completion_rows()
    return context_for(directory, "train.sft", model, rows, "prompt_completion", **{**BASE, **options})


def same(one: Path, other: Path) -> bool:
    a, b = weights(one / "out-model"), weights(other / "out-model")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def arguments_of(config: SftOptions) -> Any:
    from posttrain_plugins.training.setting import arguments

    return arguments(config, 10, Path("unused"))
