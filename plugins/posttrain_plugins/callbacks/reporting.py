"""What the callbacks that report to a library of metrics share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config


class Reporter(Callback):
    """Base of reporters: they watch, and only rank 0 has one."""

    watches_only = True


def run_name(training: Training) -> str:
    """Return what a run is called: the node, and the beginning of its key, which a resumed one shares."""
    return f"{training.context.node}-{training.context.work.name[:12]}"


def directory(training: Training, given: str | None, library: str) -> Path:
    """Return where a library keeps a run on this machine, created if need be."""
    context = training.context
    root = context.workspace / library if given is None else context.base / given
    path = root / run_name(training)
    path.mkdir(parents=True, exist_ok=True)
    return path


def options(training: Training) -> dict[str, Any]:
    """Return the trainer's options as JSON; secrets are references in them."""
    config: Config = training.config
    return config.model_dump(mode="json")
