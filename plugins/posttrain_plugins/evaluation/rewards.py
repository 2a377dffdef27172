"""What a model that gives numbers says of whole datasets, batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.contracts.trainer import Example
from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget, cut
from posttrain_plugins.training.head import ValueHead, Wanted
from posttrain_plugins.training.layouts import LAYOUTS


def values_of(
    model: Any,
    examples: Sequence[Example],
    tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, list[float]]:
    """Return the model's numbers at the supervised places of each example, by row.

    Args:
        model: A model that gives numbers.
        examples: Sequences whose supervised places are their `own`.
        tokens: Upper bound of padded tokens in one batch; a batch holds at least one example.
        progress: Called with (examples done, examples in all) after each batch.

    Raises:
        StageError: A number is not finite.
    """
    head, layout, device = ValueHead(), LAYOUTS["padded"], next(model.parameters()).device
    found: dict[int, list[float]] = {}
    with evaluating(model):
        for part in cut(examples, layout, Budget(tokens)):
            values = head(model, layout.arrange(part, 0, device), Wanted()).value
            assert values is not None, "such a head gives numbers"
            if not bool(values.isfinite().all()):
                raise StageError(
                    "a number of the model is not finite",
                    where=f"rows {', '.join(str(example.row + 1) for example in part[:3])} …",
                    fix="look at the training that produced the model: its weights have probably diverged",
                )
            sizes = [example.predicted for example in part]
            for example, own in zip(part, values.split(sizes), strict=True):
                found[example.row] = own.tolist()
            if progress is not None:
                progress(len(found), len(examples))
    return found
