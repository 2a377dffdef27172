"""Metrics for Weights & Biases."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.callback import Training
from posttrain.contracts.stage import Secret
from posttrain_plugins.callbacks.reporting import (
    Reporter,
    RunOptions,
    begun,
    directory,
    directory_field,
    on_rank_0,
    reported,
    run_name,
)

QUIET = {
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_LOG_MODEL": "false",
    "WANDB_WATCH": "false",
}
"""What keeps the library, and transformers' callback, from sending code, weights or what a stage prints."""


class WandbOptions(RunOptions):
    """Options of the callback `wandb`."""

    entity: str | None = Field(default=None, description="the user or team that it belongs to")
    online: bool = Field(
        default=False, description="let it use the network; else `wandb sync` sends the files later"
    )
    api_key: Secret | None = Field(default=None, description="the key of the account, as `env:WANDB_API_KEY`")
    directory: str | None = directory_field("its files go", "wandb")

    @model_validator(mode="after")
    def _key_for_the_network(self) -> Self:
        if self.online and self.api_key is None:
            raise ValueError("online needs api_key, such as `env:WANDB_API_KEY`")
        if self.api_key is not None and not self.online:
            raise ValueError("api_key would be ignored without online")
        return self


class Wandb(Reporter):
    """Report the metrics to Weights & Biases: into files, unless `online` is set. No code and no weights are sent."""

    config = WandbOptions
    target = "posttrain_plugins.callbacks.wandb:made"


@on_rank_0
def made(training: Training, config: WandbOptions) -> Any:
    """Make transformers' own callback in a run that is begun here."""
    os.environ.update(QUIET)
    import wandb
    from transformers.integrations import WandbCallback

    key = None if config.api_key is None else training.context.secret(config.api_key)
    wandb.init(
        **begun(training, config),
        entity=config.entity,
        id=run_name(training).replace("/", "-"),
        mode="online" if config.online else "offline",
        dir=str(directory(training, config.directory, "wandb")),
        # `wandb.login` would write the key into the home directory.
        settings=wandb.Settings(api_key=key),
    )
    return reported(WandbCallback, wandb)
