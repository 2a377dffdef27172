"""Worked examples: what a loss comes to on numbers that a reader can check by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.contracts.loss import Loss
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.stepping import Shown, take_step


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
    shown = Shown(batch, part_of(batch), batch)
    return round(take_step(loss(), loss.config(**(options or {})), [shown]).total.item(), 4)
