"""Columns of a dataset that are those of no format, told of the formats that one trainer takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.registry.components import ConfigProblems, validate_config
from posttrain_plugins.commands.origins import DATASETS, LOADERS

if TYPE_CHECKING:
    from posttrain.registry.catalogue import Catalogue

_LOADED = ("data", "eval")
"""The stages that may load datasets, which are called as the ports of the training are."""


def require_fitting(stages: Mapping[str, Any], trainer: str, verb: str, catalogue: Catalogue) -> None:
    """Refuse columns of no format; the stage that loads them knows no trainer, and would speak of every format.

    Whatever else is wrong with a dataset or its options is left to the plan.

    Args:
        stages: The stages of a training command.
        trainer: The registered name of the trainer.
        verb: What people call the command.
        catalogue: Knows both.

    Raises:
        NoFormat: There are such columns.
    """
    from posttrain_plugins.data.formats import NoFormat, unfit_for
    from posttrain_plugins.data.load import LoadConfig, refusal

    formats = {port.name: port.formats for port in catalogue.stage(trainer).inputs}
    for name in _LOADED:
        stage = stages.get(name, {})
        if stage.get("uses") != LOADERS[DATASETS]:
            continue
        try:
            config = validate_config(LoadConfig, stage["with"], catalogue)
        except ConfigProblems:
            continue
        found = refusal(config, Path.cwd())
        error = unfit_for(formats[name], found) if isinstance(found, NoFormat) else None
        if error is not None:
            error.message, error.where = f"{error.where}: {error.message}", name
            error.expected = f"what {verb} takes: {error.expected}"
            raise error
