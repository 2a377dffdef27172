"""Metrics for trackio, in a local database."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from posttrain.contracts.callback import Training
from posttrain.contracts.component import Config
from posttrain_plugins.callbacks.reporting import Reporter, directory, options, run_name

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
"""Variables of the environment by which the library would send metrics away."""


class TrackioOptions(Config):
    """Options of the callback `trackio`."""

    project: str = Field(default="posttrain", min_length=1, description="the project")
    run_name: str | None = Field(
        default=None, description="the run; unset: the node and the beginning of its key"
    )
    directory: str | None = Field(
        default=None,
        min_length=1,
        description="where its database goes, relative to the pipeline file; unset: `trackio` in the workspace",
    )


class Trackio(Reporter):
    """Report the metrics to trackio's database on this machine; no Space is made."""

    config = TrackioOptions
    target = "posttrain_plugins.callbacks.trackio:made"


def made(training: Training, config: TrackioOptions) -> Any:
    """Make transformers' own callback in a run that is begun here."""
    if training.parallel.rank > 0:
        return object()
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    os.environ["TRACKIO_DIR"] = str(directory(training, config.directory, "trackio").parent)
    import trackio
    from transformers.integrations import TrackioCallback

    trackio.init(
        project=config.project,
        name=config.run_name or run_name(training),
        resume="allow",
        config=options(training),
        embed=False,
    )

    class Reported(TrackioCallback):  # type: ignore[misc]  # transformers leaves it untyped
        def setup(self, args: Any, state: Any, model: Any, **_: Any) -> None:
            self._initialized = True

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._trackio.finish()

    return Reported()
