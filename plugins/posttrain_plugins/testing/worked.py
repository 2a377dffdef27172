"""Worked examples: what a loss comes to on numbers that a reader can check by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import Loss
from posttrain.contracts.reduction import Part
from posttrain_plugins.testing.batches import batch_of, part_of


def worked(loss: type[Loss], options: Mapping[str, Any] | None = None, /, **values: Any) -> float:
    """Return the loss of one optimizer step over a batch, in its first step, rounded to four digits.

    Args:
        loss: The loss.
        options: Its options; the defaults where left out.
        values: The fields of the family's batch as lists; see `batch_of`.

    Example:
        >>> from posttrain_plugins.losses.preference.sigmoid import Sigmoid
        >>> worked(Sigmoid, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0])
        0.3133
    """
    batch = batch_of(loss.family, **values)
    return round(float(step_loss(loss(), loss.config(**(options or {})), batch, part_of(batch))), 4)


def step_loss(plugin: Loss, config: Any, batch: Any, part: Part) -> Tensor:
    """Return what the loop makes of a whole step in one part: measured, advanced, called, weighted and reduced."""
    state = plugin.begin(config)
    with torch.no_grad():
        measured = plugin.measure(batch, config, state)
    stats = {name: value.detach().double() for name, value in measured.items()}
    output = plugin(batch, config, stats, plugin.advance(state, stats, config))
    return torch.stack([each.weight * each.reduction.total(each.values, part) for each in output.terms]).sum()
