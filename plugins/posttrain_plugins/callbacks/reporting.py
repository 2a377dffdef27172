"""What the callbacks that report to a library of metrics share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config

Options = TypeVar("Options", bound=Config)
Made = Callable[[Training, Options], Any]


class Reporter(Callback):
    """Base of reporters: they watch, and only rank 0 has one."""

    watches_only = True


class RunOptions(Config):
    """Options of reporters to a library that keeps runs of projects."""

    project: str = Field(default="posttrain", min_length=1, description="the project")
    run_name: str | None = Field(
        default=None, description="the run; unset: the node and the beginning of its key"
    )


def directory_field(what: str, library: str) -> Any:
    """Return the option that says where a library keeps something, such as `its files go`."""
    return Field(
        default=None,
        min_length=1,
        description=f"where {what}, relative to the pipeline file; unset: `{library}` in the workspace",
    )


def on_rank_0(made: Made[Options]) -> Made[Options]:
    """Let what makes a callback make one on rank 0 alone, and something that hears nothing on the others."""

    @wraps(made)
    def of(training: Training, config: Options) -> Any:
        return object() if training.parallel.rank > 0 else made(training, config)

    return of


def begun(training: Training, config: RunOptions) -> dict[str, Any]:
    """Return what a library's `init` is told of a run, which goes on where it has begun before."""
    return {
        "project": config.project,
        "name": config.run_name or run_name(training),
        "resume": "allow",
        "config": options(training),
    }


def reported(base: type, library: Any) -> Any:
    """Return a callback of transformers that reports to the run that was begun here.

    Args:
        base: The callback's class.
        library: The library, which ends the run.
    """

    class Reported(base):  # type: ignore[misc]  # transformers leaves it untyped
        def setup(self, args: Any, state: Any, model: Any, **_: Any) -> None:
            self._initialized = True

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            library.finish()

    return Reported()


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
