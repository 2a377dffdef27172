"""Metrics for trackio, in a local database."""

from __future__ import annotations

import os
from typing import Any

from posttrain.contracts.callback import Training
from posttrain_plugins.callbacks.reporting import (
    Reporter,
    RunOptions,
    begun,
    directory,
    directory_field,
    on_rank_0,
    reported,
)

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
"""Variables of the environment by which the library would send metrics away."""


class TrackioOptions(RunOptions):
    """Options of the callback `trackio`."""

    directory: str | None = directory_field("its database goes", "trackio")


class Trackio(Reporter):
    """Report the metrics to trackio's database on this machine; no Space is made."""

    config = TrackioOptions
    target = "posttrain_plugins.callbacks.trackio:made"


@on_rank_0
def made(training: Training, config: TrackioOptions) -> Any:
    """Make transformers' own callback in a run that is begun here."""
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    os.environ["TRACKIO_DIR"] = str(directory(training, config.directory, "trackio").parent)
    import trackio
    from transformers.integrations import TrackioCallback

    trackio.init(**begun(training, config), embed=False)
    return reported(TrackioCallback, trackio)
