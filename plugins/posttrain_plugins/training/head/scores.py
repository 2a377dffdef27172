"""What a head gives for each supervised token, and what may be asked of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from posttrain_plugins.training.microbatch import MicroBatch


@dataclass(frozen=True)
class Wanted:
    """What is to be computed beside log-probs.

    Args:
        entropy: The entropy of the policy at each token.
        entropy_gradient: Let gradients flow from the entropy.
        top1: Whether the token is the most likely one.
        squares: Σ_v π(v)², with gradient.
        mean_logp: The mean of log π(v) over the vocabulary, with gradient.
    """

    entropy: bool = False
    entropy_gradient: bool = False
    top1: bool = False
    squares: bool = False
    mean_logp: bool = False

    @property
    def linear(self) -> bool:
        """Whether gradients flow from log-probs alone, so that one number scales a token's gradient."""
        return not (self.entropy_gradient or self.squares or self.mean_logp)

    def scores(
        self, logp: Tensor, entropy: Tensor, top1: Tensor, squares: Tensor, mean_logp: Tensor
    ) -> TokenScores:
        """Return what was computed, without what was not wanted."""
        return TokenScores(
            logp,
            entropy,
            top1,
            squares=squares if self.squares else None,
            mean_logp=mean_logp if self.mean_logp else None,
        )


@dataclass(frozen=True)
class TokenScores:
    """The policy at N supervised tokens, in nats; float32 (float64 if the model is).

    Args:
        logp: log π(token | prefix), shape [N], with gradient.
        entropy: Shape [N]; zeros unless wanted, detached unless its gradient is.
        top1: Whether no other token is more likely, shape [N]; False unless wanted.
        squares: Σ_v π(v)², shape [N], with gradient; None unless wanted.
        value: Of models that give numbers, the number at each of the N places, shape [N], with gradient; all else is
            zeros then.
        mean_logp: The mean of log π(v) over the vocabulary, shape [N], with gradient; None unless wanted.
    """

    logp: Tensor
    entropy: Tensor
    top1: Tensor
    squares: Tensor | None = None
    value: Tensor | None = None
    mean_logp: Tensor | None = None

    @property
    def given(self) -> dict[str, Tensor]:
        """What there is, by name: a model's output, which wrappers look through for tensors."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of_values(cls, value: Tensor) -> TokenScores:
        """Return the scores of a model that gives numbers, shape [N]."""
        nothing = torch.zeros_like(value.detach())
        return cls(nothing, nothing, nothing.bool(), value=value)


@dataclass(frozen=True)
class Tail:
    """What a model does with the output of its head: `cap · tanh(scale · z / cap)`.

    Args:
        scale: Factor of the logits.
        cap: Soft bound of the scaled logits; None: unbounded.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the logits of a head's output."""
        scaled = raw * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap


class Head(ABC):
    """One way from a micro-batch to the scores of its supervised tokens."""

    full: bool = False
    """Whether logits of all positions are computed, supervised or not."""
    bounded: bool = False
    """Whether memory stays within bounds however many tokens are supervised."""

    @abstractmethod
    def __call__(self, model: Any, micro: MicroBatch, wanted: Wanted) -> TokenScores:
        """Run the policy once.

        Args:
            model: The policy, wrapped by its backend or not; it is the wrapper that is called.
            micro: What to run it on.
            wanted: What is needed beside log-probs.
        """
