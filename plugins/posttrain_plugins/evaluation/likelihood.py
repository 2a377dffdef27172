"""Negative log-likelihood of completions under a policy, batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError, StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import cut, probe
from posttrain_plugins.training.head import (
    TOLERANCE,
    FullHead,
    Head,
    TokenScores,
    Wanted,
    budget_of,
    choose_head,
)
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.microbatch import MicroBatch

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy
    from posttrain_plugins.templates.encoder import Encoded


def completion_nll(
    policy: Policy,
    sequences: Sequence[Encoded],
    *,
    batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[tuple[float, int]]:
    """Score the supervised tokens of each sequence.

    Args:
        policy: The model with its encoder.
        sequences: Tokens with their supervised positions; a token at position 0 has nothing to be predicted
            from.
        batch_tokens: Upper bound of padded tokens in one batch; a batch holds at least one sequence. Logits
            are bounded as in training.
        progress: Called with (sequences done, sequences in all) after each batch.
        warn: Told when the model computes all logits, which takes more memory.

    Returns:
        For each sequence Σ −log p(token | prefix) in nats, and the number of tokens scored.

    Raises:
        DataError: A sequence is longer than the model's context.
        StageError: The likelihood is not finite.
    """
    _require_room(policy, sequences)
    examples = [
        Example(row, (TokenSequence(each.tokens, each.supervised, "completion", images=each.images),))
        for row, each in enumerate(sequences)
    ]
    found = log_probs(policy, examples, batch_tokens=batch_tokens, progress=progress, warn=warn)
    return [(-found[row][0], example.sequences[0].predicted) for row, example in enumerate(examples)]


def log_probs(
    policy: Policy,
    examples: Sequence[Example],
    *,
    batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[int, list[float]]:
    """Return Σ log p(token | prefix) over the supervised tokens of each sequence, in nats, by the examples' rows.

    Args:
        policy: The model with its encoder.
        examples: What is scored; all sequences of an example lie in the same batch.
        batch_tokens: As of `completion_nll`, for examples.
        progress: Called with (examples done, examples in all) after each batch.
        warn: As of `completion_nll`.

    Raises:
        StageError: The likelihood is not finite.
    """
    model, found = policy.model, {}
    device, layout = next(model.parameters()).device, LAYOUTS["padded"]
    with evaluating(model):
        head = _head(model, examples, device, warn)
        for part in cut(examples, layout, budget_of(model, head, batch_tokens)):
            micro = layout.arrange(part, 0, device)
            totals = iter(_totals(head(model, micro, Wanted()), micro))
            for example in part:
                found[example.row] = [next(totals) for _ in example.sequences]
            if progress is not None:
                progress(len(found), len(examples))
    return found


def _head(
    model: Any, examples: Sequence[Example], device: torch.device, warn: Callable[[str], None] | None
) -> Head:
    """Choose how supervised positions get their log-probs, and say when it is not the fast way."""
    rows = probe([example for example in examples if example.predicted])
    if not rows:
        return FullHead()
    head, told = choose_head(model, LAYOUTS["padded"].arrange(rows, 0, device), TOLERANCE[False])
    if told is not None and warn is not None:
        warn(told)
    return head


def _totals(scores: TokenScores, micro: MicroBatch) -> list[float]:
    """Return Σ log p of the supervised tokens of each sequence, in nats, summed in float64."""
    logp = scores.logp.double()
    totals = logp.new_zeros(len(micro.lengths)).index_add_(0, micro.sequence, logp)
    if not bool(totals.isfinite().all()):
        raise StageError(
            "the model's likelihood of a completion is not finite",
            where=f"rows {', '.join(str(example.row + 1) for example in micro.examples[:3])} …",
            fix="look at the training that produced the model: its weights have probably diverged",
        )
    return [float(total) for total in totals]


def _require_room(policy: Policy, sequences: Sequence[Encoded]) -> None:
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    for index, sequence in enumerate(sequences):
        if context is not None and len(sequence.tokens) > context:
            raise DataError(
                "this prompt and its completion are longer than the model's context",
                where=f"row {index}",
                found=f"{len(sequence.tokens)} tokens",
                expected=f"at most {context}",
                fix="drop the row, or use a model with a longer context",
            )
