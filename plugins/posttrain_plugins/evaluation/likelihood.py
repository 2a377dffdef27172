"""Negative log-likelihood of completions under a policy, batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.errors import DataError, StageError
from posttrain_plugins.evaluation.mode import evaluating

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy
    from posttrain_plugins.templates.encoder import Encoded

_CHUNK = 1024
"""Positions whose log-softmax is held at a time."""


def completion_nll(
    policy: Policy,
    sequences: Sequence[Encoded],
    *,
    batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, int]]:
    """Score the supervised tokens of each sequence.

    Args:
        policy: The model with its encoder.
        sequences: Tokens with their supervised positions; a token at position 0 has nothing to be predicted
            from.
        batch_tokens: Upper bound of padded tokens in one batch; a batch holds at least one sequence.
        progress: Called with (sequences done, sequences in all) after each batch.

    Returns:
        For each sequence Σ −log p(token | prefix) in nats, and the number of tokens scored.

    Raises:
        DataError: A sequence is longer than the model's context.
        StageError: The likelihood is not finite.
    """
    _require_room(policy, sequences)
    found = [(0.0, 0)] * len(sequences)
    done = 0
    with evaluating(policy.model):
        for batch in _batches(sequences, batch_tokens):
            for index, score in zip(batch, _score(policy, [sequences[i] for i in batch]), strict=True):
                found[index] = score
            done += len(batch)
            if progress is not None:
                progress(done, len(sequences))
    return found


def _score(policy: Policy, batch: Sequence[Encoded]) -> list[tuple[float, int]]:
    """Score one right-padded batch; only positions that predict a supervised token reach the head."""
    width = max(len(sequence.tokens) for sequence in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    real, predicting = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate(batch):
        length = len(sequence.tokens)
        ids[row, :length] = torch.tensor(sequence.tokens)
        real[row, :length] = 1
        predicting[row, : length - 1] = torch.tensor(sequence.supervised[1:], dtype=torch.bool)
    device = next(policy.model.parameters()).device
    ids, real, predicting = ids.to(device), real.to(device), predicting.to(device)
    output = policy.model(input_ids=ids, attention_mask=real, use_cache=False, logits_to_keep=predicting)
    # A model that ignores `logits_to_keep` gives logits at every position.
    logits = output.logits if output.logits.dim() == 2 else output.logits[predicting]
    row_of = predicting.nonzero()[:, 0]
    nll = _token_nll(logits, ids.roll(-1, 1)[predicting])
    totals = torch.zeros(len(batch), dtype=torch.float64, device=device).index_add_(0, row_of, nll)
    if not bool(torch.isfinite(totals).all()):
        raise StageError(
            "the model's likelihood of a completion is not finite",
            where="perplexity",
            fix="look at the training that produced the model: its weights have probably diverged",
        )
    return list(zip(totals.tolist(), predicting.sum(1).tolist(), strict=True))


def _token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log softmax(logits)[target], shape [N] in float64, from logits [N, V]."""
    parts = [logits.new_zeros(0, dtype=torch.float64)]
    for start in range(0, len(targets), _CHUNK):
        rows, wanted = logits[start : start + _CHUNK].float(), targets[start : start + _CHUNK]
        parts.append((rows.logsumexp(-1) - rows.gather(1, wanted[:, None]).squeeze(1)).double())
    return torch.cat(parts)


def _batches(sequences: Sequence[Encoded], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices, longest first, each within the token budget."""
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i].tokens), i))
    while order:
        size = max(1, batch_tokens // max(1, len(sequences[order[0]].tokens)))
        yield order[:size]
        order = order[size:]


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
