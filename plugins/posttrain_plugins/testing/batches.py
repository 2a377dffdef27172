"""Batches made by hand: what a family's batch holds, from plain lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import (
    AnswerTokens,
    Family,
    PreferenceBatch,
    ProcessRewardBatch,
    RewardBatch,
    ThreeWayBatch,
    TokenBatch,
    UnpairedBatch,
)
from posttrain.contracts.reduction import Counts, Part

Values = Mapping[str, Any]


def batch_of(family: Family, dtype: torch.dtype = torch.float64, **values: Any) -> Any:
    """Return a family's batch.

    Args:
        family: Which one.
        dtype: Of all floating-point tensors.
        values: Its fields as lists; what is left out is plain: weights of 1, answers of one token, a reference of
            zeros, every token of an example of its own, chosen answers that the policy wrote and that are certainly
            preferred. Answers spread their log-prob evenly over their tokens.
    """
    given = {name: _tensor(value, dtype) for name, value in values.items()}
    return _MAKERS[family](given)


def part_of(batch: Any) -> Part:
    """Return a batch as reductions see it, as if it were the whole step."""
    lengths, roles, examples = _LENGTHS[batch.family](batch)
    counts = Counts(int(lengths.sum()), len(lengths), examples, roles)
    return Part(torch.repeat_interleave(lengths), lengths, examples, counts)


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    found = torch.as_tensor(value)
    return found.to(dtype) if found.is_floating_point() else found


def _token(given: dict[str, Tensor]) -> TokenBatch:
    logp = given["logp"]
    plain = {
        "entropy": torch.zeros_like(logp),
        "top1": torch.zeros(len(logp), dtype=torch.bool),
        "example": torch.arange(len(logp)),
        "weight": torch.ones_like(logp),
    }
    return TokenBatch(**{**plain, **given})


def _counts(given: Values, names: Sequence[str], like: Tensor) -> dict[str, Tensor]:
    return {f"{name}_tokens": given.get(f"{name}_tokens", torch.ones(len(like))).to(like) for name in names}


def _preference(given: dict[str, Tensor]) -> PreferenceBatch:
    chosen = given["chosen"]
    counts = _counts(given, ("chosen", "rejected"), chosen)
    plain: dict[str, Any] = {
        "reference_chosen": torch.zeros_like(chosen),
        "reference_rejected": torch.zeros_like(chosen),
        "weight": torch.ones_like(chosen),
        "tokens": None,
        "own": torch.ones(len(chosen), dtype=torch.bool),
        "preference": torch.ones_like(chosen),
    }
    made = PreferenceBatch(**{**plain, **given, **counts})
    return made if made.tokens is not None else _with_tokens(made)


def _with_tokens(batch: PreferenceBatch) -> PreferenceBatch:
    """Spread each answer's log-prob evenly over its tokens."""
    lengths = torch.stack([batch.chosen_tokens, batch.rejected_tokens], 1).flatten().long()
    sequence = torch.repeat_interleave(lengths)

    def spread(chosen: Tensor, rejected: Tensor) -> Tensor:
        return (torch.stack([chosen, rejected], 1).flatten() / lengths)[sequence]

    first = lengths.cumsum(0) - lengths
    tokens = AnswerTokens(
        logp=spread(batch.chosen, batch.rejected),
        example=sequence // 2,
        answer=sequence % 2,
        place=torch.arange(len(sequence)) - first[sequence],
        reference=spread(batch.reference_chosen, batch.reference_rejected),
    )
    return PreferenceBatch(**{**vars(batch), "tokens": tokens})


def _three_way(given: dict[str, Tensor]) -> ThreeWayBatch:
    chosen = given["chosen"]
    counts = _counts(given, ("chosen", "rejected", "gold"), chosen)
    return ThreeWayBatch(**{"weight": torch.ones_like(chosen), **given, **counts})


def _unpaired(given: dict[str, Tensor]) -> UnpairedBatch:
    logp = given["logp"]
    plain: dict[str, Any] = {
        "reference": torch.zeros_like(logp),
        "tokens": torch.ones_like(logp),
        "weight": torch.ones_like(logp),
        "mismatched": torch.full_like(logp, torch.nan),
        "reference_mismatched": torch.zeros_like(logp),
    }
    return UnpairedBatch(**{**plain, **given})


def _reward(given: dict[str, Tensor]) -> RewardBatch:
    """Answers come in pairs, the better one first, unless the examples or scores say otherwise."""
    reward = given["reward"]
    plain = {
        "example": torch.arange(len(reward)) // 2,
        "score": (torch.arange(len(reward)) % 2 == 0).to(reward),
    }
    made = {**plain, **given}
    rows = int(made["example"].max()) + 1
    return RewardBatch(**{"margin": reward.new_zeros(rows), "weight": reward.new_ones(rows), **made})


def _process_reward(given: dict[str, Tensor]) -> ProcessRewardBatch:
    logit = given["logit"]
    plain = {"example": torch.zeros(len(logit), dtype=torch.long), "weight": torch.ones_like(logit)}
    return ProcessRewardBatch(**{**plain, **given})


_MAKERS: Mapping[Family, Callable[[dict[str, Tensor]], Any]] = {
    Family.TOKEN: _token,
    Family.PREFERENCE: _preference,
    Family.THREE_WAY: _three_way,
    Family.UNPAIRED: _unpaired,
    Family.REWARD: _reward,
    Family.PROCESS_REWARD: _process_reward,
}

Lengths = tuple[Tensor, dict[str, int], int]
"""Supervised tokens of each sequence, those of each role, and the number of examples."""


def _of_tokens(batch: TokenBatch) -> Lengths:
    lengths = torch.bincount(batch.example)
    return lengths, {"completion": int(lengths.sum())}, len(lengths)


def _of_answers(*names: str) -> Callable[[Any], Lengths]:
    def lengths_of(batch: Any) -> Lengths:
        each = [getattr(batch, f"{name}_tokens").detach().long() for name in names]
        roles = {name: int(lengths.sum()) for name, lengths in zip(names, each, strict=True)}
        return torch.stack(each, 1).flatten(), roles, len(each[0])

    return lengths_of


def _of_unpaired(batch: UnpairedBatch) -> Lengths:
    lengths = batch.tokens.detach().long()
    return lengths, {"completion": int(lengths.sum())}, len(lengths)


def _of_rewards(batch: RewardBatch) -> Lengths:
    return torch.ones(len(batch.reward), dtype=torch.long), {}, len(batch.weight)


def _of_steps(batch: ProcessRewardBatch) -> Lengths:
    lengths = torch.bincount(batch.example)
    return lengths, {"completion": int(lengths.sum())}, len(lengths)


_LENGTHS: Mapping[Family, Callable[[Any], Lengths]] = {
    Family.TOKEN: _of_tokens,
    Family.PREFERENCE: _of_answers("chosen", "rejected"),
    Family.THREE_WAY: _of_answers("chosen", "rejected", "gold"),
    Family.UNPAIRED: _of_unpaired,
    Family.REWARD: _of_rewards,
    Family.PROCESS_REWARD: _of_steps,
}
