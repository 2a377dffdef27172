"""What losses over steps report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.contracts.loss import ProcessRewardBatch

if TYPE_CHECKING:
    from torch import Tensor

DIAGNOSTICS = frozenset({"accuracy", "steps/probability", "steps/label", "answers/accuracy"})
"""The metrics that `diagnostics` returns."""
EVEN = 0.5
"""The label of a step that may as well be wrong as right."""


def diagnostics(batch: ProcessRewardBatch) -> dict[str, Tensor]:
    """Return how well steps are told, one by one and answer by answer.

    `accuracy`: whether odds and label are on the same side of one half; a label of exactly one half is left out.
    `answers/accuracy`: whether that holds of all such steps of an answer, if it has any. `steps/probability`: how
    likely a step is held to be right. `steps/label`: how many are; an accuracy of no more than the larger share of
    labels is worth nothing.
    """
    import torch

    logit, label = batch.logit.detach(), batch.label
    told = ((logit > 0) == (label > EVEN)).to(logit.dtype)
    told = torch.where(label == EVEN, torch.nan, told)
    _, answer = torch.unique_consecutive(batch.example, return_inverse=True)
    answers = int(answer[-1]) + 1 if len(answer) else 0
    none = logit.new_zeros(answers)
    wrong = none.index_add(0, answer, (told == 0).to(logit.dtype))
    judged = none.index_add(0, answer, told.isfinite().to(logit.dtype))
    return {
        "accuracy": told,
        "steps/probability": logit.sigmoid(),
        "steps/label": label,
        "answers/accuracy": torch.where(judged > 0, (wrong == 0).to(logit.dtype), torch.nan),
    }
