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
    """

    entropy: bool = False
    entropy_gradient: bool = False
    top1: bool = False
    squares: bool = False

    @property
    def linear(self) -> bool:
        """Whether gradients flow from log-probs alone, so that one number scales a token's gradient."""
        return not (self.entropy_gradient or self.squares)


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
    """

    logp: Tensor
    entropy: Tensor
    top1: Tensor
    squares: Tensor | None = None
    value: Tensor | None = None

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
