"""Metrics for TensorBoard, in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from posttrain.contracts.callback import Training
from posttrain.contracts.component import Config
from posttrain_plugins.callbacks.reporting import Reporter, directory, directory_field, on_rank_0, options


class TensorBoardOptions(Config):
    """Options of the callback `tensorboard`."""

    directory: str | None = directory_field("the event files go", "tensorboard")


class TensorBoard(Reporter):
    """Write the metrics for TensorBoard. Nothing leaves the machine; `tensorboard --logdir DIRECTORY` shows them."""

    config = TensorBoardOptions
    target = "posttrain_plugins.callbacks.tensorboard:made"


@on_rank_0
def made(training: Training, config: TensorBoardOptions) -> Any:
    """Make transformers' own callback with a writer of this run."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    class Written(TensorBoardCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tb_writer.add_text("options", f"```\n{json.dumps(options(training), indent=1)}\n```")

    place = directory(training, config.directory, "tensorboard")
    training.context.note(f"TensorBoard's files are in {place}")
    written: Callable[[SummaryWriter], Any] = Written
    return written(SummaryWriter(log_dir=str(place)))
