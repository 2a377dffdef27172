"""What a loss is given: the batch of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.contracts.needs import Governed, Need

if TYPE_CHECKING:
    from torch import Tensor


class Family(StrEnum):
    """Which batch a loss takes.

    TOKEN: `TokenBatch`, supervised tokens. PREFERENCE: `PreferenceBatch`, pairs. THREE_WAY: `ThreeWayBatch`, pairs
    beside a gold answer. UNPAIRED: `UnpairedBatch`, answers that are good or bad. REWARD: `RewardBatch`, numbers that
    a model gives to whole answers. PROCESS_REWARD: `ProcessRewardBatch`, numbers that it gives to steps of answers.
    """

    TOKEN = "token"
    PREFERENCE = "preference"
    THREE_WAY = "three_way"
    UNPAIRED = "unpaired"
    REWARD = "reward"
    PROCESS_REWARD = "process_reward"


_UNMADE: Any = None
"""What a field is until it is filled, or replaced with what refuses."""


@dataclass(frozen=True)
class TokenBatch(Governed):
    """Supervised tokens, flattened.

    Args:
        logp: log π(token | prefix), shape [N], with gradient.
        entropy: Entropy of the policy at each token, shape [N], nats; with gradient where `Need.ENTROPY` is
            declared, else for metrics alone: a term that depends on it is refused.
        top1: Whether the token is the policy's most likely one, shape [N], bool; False unless the trainer has
            `diagnostics`.
        example: Index of the example each token belongs to, shape [N].
        weight: The example's weight at each token, shape [N].
        squares: Σ_v π(v)² at each token, shape [N], where `Need.SQUARES` is declared.
        mean_logp: The mean of log π(v) over the vocabulary at each token, shape [N], where `Need.MEAN_LOGP` is
            declared.
    """

    family: ClassVar[Family] = Family.TOKEN
    governed: ClassVar[Mapping[str, Need]] = {
        "entropy": Need.ENTROPY,
        "squares": Need.SQUARES,
        "mean_logp": Need.MEAN_LOGP,
    }
    logp: Tensor
    entropy: Tensor
    top1: Tensor
    example: Tensor
    weight: Tensor
    squares: Tensor = _UNMADE
    mean_logp: Tensor = _UNMADE


@dataclass(frozen=True)
class AnswerTokens(Governed):
    """The N supervised tokens of all answers of a batch, for losses that look into them.

    Args:
        logp: log π(token | prefix), shape [N], with gradient.
        example: Index of the pair (or row) each token belongs to, shape [N].
        answer: Which answer of it: 0 chosen, 1 rejected, in the order of the batch's fields, shape [N].
        place: Number of the token in its answer, from 0, shape [N].
        reference: log π_ref of each token, shape [N], where `Need.REFERENCE_TOKENS` is declared.
        squares: Σ_v π(v)² at each token, shape [N], where `Need.SQUARES` is declared.
    """

    governed: ClassVar[Mapping[str, Need]] = {
        "reference": Need.REFERENCE_TOKENS,
        "squares": Need.SQUARES,
    }
    logp: Tensor
    example: Tensor
    answer: Tensor
    place: Tensor
    reference: Tensor = _UNMADE
    squares: Tensor = _UNMADE


@dataclass(frozen=True)
class PreferenceBatch(Governed):
    """Pairs; every tensor has shape [P] (pairs).

    Args:
        chosen: Σ log π(chosen | prompt) under the policy, with gradient.
        rejected: Σ log π(rejected | prompt) under the policy, with gradient.
        reference_chosen: The same under the reference, without gradient, where `Need.REFERENCE` is declared.
        reference_rejected: The same under the reference, likewise.
        chosen_tokens: Number of supervised tokens of each chosen completion.
        rejected_tokens: Number of supervised tokens of each rejected completion.
        weight: The row's weight.
        tokens: The tokens of both answers, one by one.
        own: Whether the policy wrote the chosen answer, and the reference the rejected one, or it is the other way
            round, bool, where `Need.AUTHORS` is declared.
        preference: How likely the chosen answer is preferred to the rejected one, where `Need.PREFERENCE` is declared.
    """

    family: ClassVar[Family] = Family.PREFERENCE
    governed: ClassVar[Mapping[str, Need]] = {
        "reference_chosen": Need.REFERENCE,
        "reference_rejected": Need.REFERENCE,
        "own": Need.AUTHORS,
        "preference": Need.PREFERENCE,
    }
    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    weight: Tensor
    tokens: AnswerTokens | None = None
    own: Tensor = _UNMADE
    preference: Tensor = _UNMADE

    @property
    def margin(self) -> Tensor:
        """(chosen − reference_chosen) − (rejected − reference_rejected), shape [P]."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


@dataclass(frozen=True)
class ThreeWayBatch:
    """Pairs beside a gold answer; every tensor has shape [P] (pairs).

    Args:
        chosen: Σ log π(chosen | prompt) under the policy, with gradient.
        rejected: Σ log π(rejected | prompt) under the policy, with gradient.
        gold: Σ log π(gold | prompt) under the policy, with gradient.
        chosen_tokens: Number of supervised tokens of each chosen completion.
        rejected_tokens: Number of supervised tokens of each rejected completion.
        gold_tokens: Number of supervised tokens of each gold completion.
        weight: The row's weight.
    """

    family: ClassVar[Family] = Family.THREE_WAY
    chosen: Tensor
    rejected: Tensor
    gold: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    gold_tokens: Tensor
    weight: Tensor


@dataclass(frozen=True)
class UnpairedBatch(Governed):
    """Answers that are good or bad; every tensor has shape [U] (rows).

    Args:
        logp: Σ log π(completion | prompt) under the policy, with gradient.
        reference: The same under the reference, without gradient, where `Need.REFERENCE` is declared.
        tokens: Number of supervised tokens of each completion.
        desirable: Whether the completion is good, bool.
        weight: The row's weight.
        mismatched: Σ log π of another row's completion under this row's prompt, where `Need.MISMATCHED` is declared;
            NaN for a row that no other row's completion could be found for. It is for `measure` alone, which then knows
            nothing of the completions themselves (NaN), unless the loss's scope is the whole step.
        reference_mismatched: The same under the reference, where `Need.REFERENCE` is declared as well.
    """

    family: ClassVar[Family] = Family.UNPAIRED
    governed: ClassVar[Mapping[str, Need]] = {
        "reference": Need.REFERENCE,
        "mismatched": Need.MISMATCHED,
        "reference_mismatched": Need.MISMATCHED,
    }
    logp: Tensor
    reference: Tensor
    tokens: Tensor
    desirable: Tensor
    weight: Tensor
    mismatched: Tensor = _UNMADE
    reference_mismatched: Tensor = _UNMADE

    @property
    def log_ratio(self) -> Tensor:
        """Log π/π_ref of each completion, shape [U]."""
        return self.logp - self.reference


@dataclass(frozen=True)
class RewardBatch(Governed):
    """What a reward model says of S answers to E prompts.

    Args:
        reward: The model's number for each answer, shape [S], with gradient.
        score: What the data says of each answer, shape [S]: more is better. A preference row gives its chosen answer 1
            and its rejected one 0.
        example: Index of the prompt each answer belongs to, shape [S], ascending.
        weight: The row's weight, shape [E].
        margin: By how much rewards of a row's answers should differ at least, shape [E], zeros unless the data says,
            where `Need.MARGIN` is declared.
    """

    family: ClassVar[Family] = Family.REWARD
    governed: ClassVar[Mapping[str, Need]] = {"margin": Need.MARGIN}
    reward: Tensor
    score: Tensor
    example: Tensor
    weight: Tensor
    margin: Tensor = _UNMADE

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Indices of the better and of the worse answer of every pair of answers to one prompt, shape [P] each.

        Answers with equal scores make no pair.
        """
        same = self.example[:, None] == self.example[None, :]
        better = self.score[:, None] > self.score[None, :]
        first, second = (same & better).nonzero(as_tuple=True)
        return first, second


@dataclass(frozen=True)
class ProcessRewardBatch:
    """What a process reward model says of N steps of answers; every tensor has shape [N] (steps).

    Args:
        logit: Log-odds that the answer is right up to the step's end, with gradient.
        label: What the data says: 1 right, 0 wrong, or a probability in between.
        example: Index of the row each step belongs to, ascending.
        weight: The row's weight at each step.
    """

    family: ClassVar[Family] = Family.PROCESS_REWARD
    logit: Tensor
    label: Tensor
    example: Tensor
    weight: Tensor
