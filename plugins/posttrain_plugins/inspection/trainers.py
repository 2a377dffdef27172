"""Whose view of the rows: the trainer, and how it prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.contracts.component import Choice
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Need
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Trainer
from posttrain.errors import SpecError
from posttrain.registry.components import resolve
from posttrain.registry.discovery import discover
from posttrain_plugins.data.formats import BUILT_IN, format_of
from posttrain_plugins.inspection.models import Model
from posttrain_plugins.preparation.examples import Preparation

_COMMON = ("train.sft", "train.dpo")
"""Asked first where several trainers take a format."""


def takes(format: str, name: str | None, files: Sequence[Path] = ()) -> tuple[str, Trainer | None]:
    """Return the trainer of a name, or the first one that takes a format; None where no trainer does.

    Raises:
        PluginError: There is no such trainer.
        SpecError: It does not take the format.
    """
    catalogue = discover(files)
    names = catalogue.names(Group.TRAINER)
    if name is not None:
        catalogue.entry(Group.TRAINER, name)
    for each in [name] if name is not None else sorted(names, key=lambda each: each not in _COMMON):
        trainer = catalogue.stage(each)
        if isinstance(trainer, Trainer) and format in trainer.formats:
            return each, trainer
        if name is not None:
            formats = ", ".join(sorted(getattr(trainer, "formats", ())))
            raise SpecError(f"{name} takes no rows of format `{format}`", where="--trainer", expected=formats)
    return "no trainer", None


def form_of(name: str) -> Format:
    """Return a format by name, built in or another plugin's."""
    if name in BUILT_IN:
        return format_of(name)
    form: Format = discover().make(Group.FORMAT, name)
    return form


def needs_of(trainer: Trainer, config: Any, files: Sequence[Path] = ()) -> frozenset[Need]:
    """Return what the losses and options of a training need of the rows.

    Answers of other rows are left out: nothing of them is learned.
    """
    catalogue, chosen = discover(files), config.loss
    losses = [
        resolve(each, Group.LOSS, catalogue) for each in ([chosen] if isinstance(chosen, Choice) else chosen)
    ]
    needs = [loss.plugin.needs_of(loss.config) for loss in losses]
    return frozenset[Need]().union(trainer.needs(config), *needs) - {Need.MISMATCHED}


def preparation(
    trainer: Trainer | None,
    config: Any,
    format: Format,
    model: Model,
    directory: Path | None,
    needs: frozenset[Need] = frozenset(),
) -> Preparation:
    """Return how rows become examples, as a trainer's own stage does it.

    Args:
        trainer: The trainer; None for rows that none takes, such as prompts.
        config: Its options.
        format: The rows' format.
        model: The model.
        directory: Where the rows' images are.
        needs: What a loss needs of the rows.
    """
    if trainer is None:
        return Preparation(format.passages, model.encoder, directory=directory)
    return Preparation(
        lambda row: trainer.passages(row, format, needs),
        model.encoder,
        config.max_length or model.context,
        config.truncation,
        config.weight_column,
        trainer.supervise(config),
        directory,
        lambda row: trainer.verdicts(row, format, needs),
    )
