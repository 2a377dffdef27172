"""What changes the numbers of every loss over pairs alike: tokens that count less, and pairs that count less."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.contracts.loss import AnswerTokens, PreferenceBatch

if TYPE_CHECKING:
    from torch import Tensor


def desensitized(batch: PreferenceBatch, alpha: float) -> PreferenceBatch:
    """Return pairs in which tokens of an answer beyond the length of the other one count `alpha`, not 1.

    It holds for the policy and for the reference, whose tokens are known where it has any
    (LD-DPO, Liu et al. 2024, https://arxiv.org/abs/2409.06411).
    """
    tokens = _tokens(batch)
    shared = batch.chosen_tokens.minimum(batch.rejected_tokens)[tokens.example]
    counts = (tokens.place < shared).to(tokens.logp)
    counts = counts + alpha * (1 - counts)
    counted = replace(tokens, logp=tokens.logp * counts)
    chosen, rejected = _totals(batch, counted.logp)
    made = replace(batch, chosen=chosen, rejected=rejected, tokens=counted)
    if not tokens.holds("reference"):
        return made
    counted = replace(counted, reference=tokens.reference * counts)
    chosen, rejected = _totals(batch, tokens.reference * counts)
    return replace(made, reference_chosen=chosen, reference_rejected=rejected, tokens=counted)


def policy_weights(batch: PreferenceBatch) -> Tensor:
    """Return how likely the policy is to say both answers of each pair, shape [P], without gradient.

    Each answer has e^mean(log π(token) − log Σ_v π(v)²), which is 1 where its tokens are as likely as those that the
    policy samples (WPO, Zhou et al. 2024, eq. 2, https://arxiv.org/abs/2406.11827, with sampled alignment).
    """
    tokens = _tokens(batch)
    chosen, rejected = _totals(batch, tokens.logp.detach() - tokens.squares.detach().log())
    return (chosen / batch.chosen_tokens + rejected / batch.rejected_tokens).exp()


def _tokens(batch: PreferenceBatch) -> AnswerTokens:
    assert batch.tokens is not None, "trainers hand on the tokens of both answers"
    return batch.tokens


def _totals(batch: PreferenceBatch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values of tokens over each chosen and each rejected answer, shape [P] each."""
    tokens = _tokens(batch)
    sums = values.new_zeros(2 * len(batch.weight)).index_add(0, 2 * tokens.example + tokens.answer, values)
    chosen, rejected = sums.view(-1, 2).unbind(1)
    return chosen, rejected
