"""Reductions: how the values of a term become one number for the whole optimizer step.

Each is a sum over the values of a micro-batch with denominators of the whole step, so partial sums add up to the
same number however the step is cut and dealt to ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.errors import StageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """What the whole optimizer step holds, on all ranks: supervised tokens, sequences, examples.

    `roles` are the supervised tokens of the sequences of each role, such as `chosen`.
    """

    tokens: int
    sequences: int
    examples: int
    roles: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One part of a step, as reductions see it.

    Args:
        sequence: Index of the sequence each of the N tokens belongs to, shape [N].
        lengths: Supervised tokens of each of the S sequences, shape [S].
        examples: Number of examples, E.
        step: What the whole step holds.
    """

    sequence: Tensor
    lengths: Tensor
    examples: int
    step: Counts

    @property
    def sizes(self) -> dict[str, int]:
        """How many values a term may have, by what they belong to."""
        return {
            "tokens": len(self.sequence),
            "sequences": len(self.lengths),
            "examples": self.examples,
        }


class Reduction(ABC):
    """How a term's values are reduced. `over` names what they may belong to."""

    over: tuple[str, ...] = ("tokens", "sequences", "examples")

    @abstractmethod
    def total(self, values: Tensor, part: Part) -> Tensor:
        """Return the part's share of the step's number, a scalar with gradient."""


@dataclass(frozen=True)
class TokenMean(Reduction):
    """Σ over tokens / number of supervised tokens of the step: long answers weigh more than short ones."""

    over = ("tokens",)

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Sum and divide."""
        return values.sum() / part.step.tokens

    def __str__(self) -> str:
        return "token_mean"


@dataclass(frozen=True)
class RoleTokenMean(Reduction):
    """Σ / number of supervised tokens of the step in sequences of one role: of all chosen answers, say.

    Values may belong to anything; a value of a sequence stands for the sum over its tokens.
    """

    role: str

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Sum and divide.

        Raises:
            StageError: No sequence of the step has the role.
        """
        if self.role not in part.step.roles:
            raise StageError(
                "a reduction is over the tokens of a role that no sequence has",
                where=str(self),
                found=self.role,
                expected=f"one of {', '.join(part.step.roles)}",
            )
        return values.sum() / part.step.roles[self.role]

    def __str__(self) -> str:
        return f"token_mean:{self.role}"


@dataclass(frozen=True)
class SequenceMean(Reduction):
    """Σ over tokens or sequences / number of sequences of the step."""

    over = ("tokens", "sequences")

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Sum and divide."""
        return values.sum() / part.step.sequences

    def __str__(self) -> str:
        return "sequence_mean"


@dataclass(frozen=True)
class ExampleMean(Reduction):
    """Σ over tokens, sequences or examples / number of examples of the step: of pairs, for preferences."""

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Sum and divide."""
        return values.sum() / part.step.examples

    def __str__(self) -> str:
        return "example_mean"


@dataclass(frozen=True)
class MeanOfSequenceMeans(Reduction):
    """The mean over tokens within each sequence, averaged over the sequences of the step."""

    over = ("tokens",)

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Divide each token's value by its sequence's length, sum, and divide by the sequences."""
        return (values / part.lengths[part.sequence]).sum() / part.step.sequences

    def __str__(self) -> str:
        return "mean_of_sequence_means"


@dataclass(frozen=True)
class Constant(Reduction):
    """Σ / n, with a number that no data changes (Liu et al. 2025, https://arxiv.org/abs/2503.20783)."""

    n: float

    def total(self, values: Tensor, part: Part) -> Tensor:
        """Sum and divide."""
        return values.sum() / self.n

    def __str__(self) -> str:
        return f"constant:{self.n:g}"


TOKEN_MEAN = TokenMean()
SEQUENCE_MEAN = SequenceMean()
EXAMPLE_MEAN = ExampleMean()
MEAN_OF_SEQUENCE_MEANS = MeanOfSequenceMeans()

_NAMED = {str(each): each for each in (TOKEN_MEAN, SEQUENCE_MEAN, EXAMPLE_MEAN, MEAN_OF_SEQUENCE_MEANS)}


def reduction(name: str) -> Reduction:
    """Return the reduction that an option names: `token_mean`, …, `constant:512`.

    Raises:
        ValueError: There is no such reduction, or the constant is not a positive number.
    """
    if name in _NAMED:
        return _NAMED[name]
    kind, _, number = name.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if kind == "constant" and 0 < value < float("inf"):
        return Constant(value)
    raise ValueError(f"{name!r} is no reduction; expected {', '.join(_NAMED)} or constant:<positive number>")
