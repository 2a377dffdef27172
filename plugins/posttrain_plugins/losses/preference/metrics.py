"""What losses over pairs report, so that runs with different losses can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import PreferenceBatch
from posttrain_plugins.losses.likelihood import told

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]


def rewards(batch: PreferenceBatch, beta: float) -> Metrics:
    """The implicit rewards β log π/π_ref of both answers, their margin, and whether it has the right sign."""
    chosen = beta * (batch.chosen - batch.reference_chosen)
    return told(batch, chosen, beta * (batch.rejected - batch.reference_rejected))
