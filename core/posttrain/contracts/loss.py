"""The loss contract: a pure function from a family's batch to unreduced terms.

    terms(batch, config) -> list[Term]

`values` are 1-D and unreduced, one per token or one per sequence (pair). The loop reduces once, over the
whole optimizer step and all its micro-batches, as `reduction` says. So no loss sees padding, accumulation or
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from posttrain.contracts.component import Config, NoOptions

if TYPE_CHECKING:
    from torch import Tensor


class Family(StrEnum):
    """Which batch a loss takes."""

    TOKEN = "token"
    PREFERENCE = "preference"


class Reduction(StrEnum):
    """How the loop reduces a term's values over the optimizer step.

    TOKEN_MEAN divides their sum by the number of supervised tokens, SEQUENCE_MEAN by the number of examples.
    """

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"


@dataclass(frozen=True)
class Term:
    """One additive part of a loss.

    Args:
        values: Unreduced, shape [N tokens] or [N examples], in nats.
        reduction: How the loop reduces them.
        weight: A number for the whole term.
    """

    values: Tensor
    reduction: Reduction
    weight: float = 1.0


@dataclass(frozen=True)
class TokenBatch:
    """Supervised tokens of one micro-batch, flattened.

    Args:
        logp: log π(token | prefix), shape [N], with gradient.
        entropy: Entropy of the policy at each token, shape [N], nats, detached.
        top1: Whether the token is the policy's most likely one, shape [N], bool.
        example: Index of the example each token belongs to, shape [N].
        weight: The example's weight at each token, shape [N].
    """

    family: ClassVar[Family] = Family.TOKEN
    logp: Tensor
    entropy: Tensor
    top1: Tensor
    example: Tensor
    weight: Tensor


@dataclass(frozen=True)
class PreferenceBatch:
    """Pairs of one micro-batch; every tensor has shape [P] (pairs).

    Args:
        chosen: Σ log π(chosen | prompt) under the policy, with gradient.
        rejected: Σ log π(rejected | prompt) under the policy, with gradient.
        reference_chosen: The same under the reference, without gradient; zeros when the loss needs no
            reference.
        reference_rejected: The same under the reference, without gradient.
        chosen_tokens: Number of supervised tokens of each chosen completion.
        rejected_tokens: Number of supervised tokens of each rejected completion.
        weight: The row's weight.
    """

    family: ClassVar[Family] = Family.PREFERENCE
    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    weight: Tensor

    @property
    def margin(self) -> Tensor:
        """(chosen − reference_chosen) − (rejected − reference_rejected), shape [P]."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)


@dataclass(frozen=True)
class LossOutput:
    """The terms of a loss and its diagnostics.

    Each metric is a detached tensor of unreduced values, shape [any]; the loop averages it over the step,
    leaving NaN out, and leaves a metric without any value out of the log.
    """

    terms: Sequence[Term]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """Registered under `Group.LOSS` as a class with these attributes.

    `needs_reference` says whether the batch's reference log-probs must be real; where they need not be, they
    are not computed.
    """

    family: ClassVar[Family]
    config: ClassVar[type[Config]] = NoOptions
    needs_reference: ClassVar[bool] = False

    def __call__(self, batch: Any, config: Any) -> LossOutput:
        """Return the unreduced terms."""
