"""What a layout is: a place in some rows for every token of every sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from posttrain.contracts.trainer import Example
from posttrain_plugins.training.layouts.blocks import Integers
from posttrain_plugins.training.microbatch import MicroBatch, Segments
from posttrain_plugins.training.pixels import seen

STEP = 64
"""Rows without padding are filled up to a multiple of this many tokens, from `STEP_FROM` tokens on: the kernels of
matrix products are made for each length anew, which takes longer than the few tokens."""
STEP_FROM = 256
EMPTY = 2
"""Tokens of the row that stands for no examples: two, as some models treat a single token as generation."""


@dataclass(frozen=True)
class Flat:
    """The C tokens of S sequences, one after the other.

    Args:
        tokens: Shape [C].
        supervised: Shape [C], bool; False at the first token of every sequence.
        sequence: The sequence of each token, shape [C].
        position: Position of each token in its sequence, shape [C].
        lengths: Tokens of each sequence, shape [S].
        own: Whether what is supervised in each sequence is read at the token itself, shape [S].
    """

    tokens: Integers
    supervised: NDArray[np.bool_]
    sequence: Integers
    position: Integers
    lengths: Integers
    own: NDArray[np.bool_]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Flat:
        """Join the sequences of some examples."""
        sequences = [sequence for example in examples for sequence in example.sequences]
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        total = int(lengths.sum())
        tokens = np.fromiter(chain.from_iterable(each.tokens for each in sequences), np.int64, total)
        supervised = np.fromiter(chain.from_iterable(each.supervised for each in sequences), bool, total)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        own = np.array([each.own for each in sequences], bool)
        return cls(tokens, supervised & (position > 0), sequence, position, lengths, own)


@dataclass(frozen=True)
class Placing:
    """Where tokens lie.

    Args:
        shape: Rows and tokens of a row.
        place: Index into the flattened rows of each token, shape [C]; equal tokens may share a place.
        segments: Which places belong together; None where each row is one sequence, padded on the right.
    """

    shape: tuple[int, int]
    place: Integers
    segments: Segments | None


def filled(tokens: int) -> int:
    """Return how long a row without padding is made."""
    return tokens if tokens < STEP_FROM else -(-tokens // STEP) * STEP


def fillable(tokens: int) -> int:
    """Return how many tokens a row without padding has at most, when it is not to be longer than this."""
    return max(tokens // STEP * STEP, min(tokens, STEP_FROM - 1))


class Layout(ABC):
    """One way to lay sequences out in rows. Stateless."""

    name: ClassVar[str]

    @abstractmethod
    def place(self, examples: Sequence[Example], flat: Flat) -> Placing:
        """Give every token a place; there is at least one example."""

    @abstractmethod
    def _size(self, examples: Sequence[Example]) -> int:
        """Return the size of the rows of at least one example."""

    def load(self, example: Example) -> int | None:
        """Return the tokens that an example adds whatever else is there; None where that depends on the others."""
        return None

    def room(self, tokens: int) -> int:
        """Return how many of these fit where `arrange` may make so many tokens."""
        return fillable(tokens)

    def size(self, examples: Sequence[Example]) -> int:
        """Return how many tokens `arrange` would make of some examples, padding included."""
        return self._size(examples) if examples else EMPTY

    def attending(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        """Return a context in which the model's forward pass keeps the segments of a micro-batch apart.

        The backward pass, recomputation of activations included, may happen outside of it.
        """
        return nullcontext()

    def arrange(self, examples: Sequence[Example], pad: int, device: torch.device | str) -> MicroBatch:
        """Lay examples out.

        Args:
            examples: All of the sequences of each are laid out; none at all make one row of padding.
            pad: A token id to pad with; which one is immaterial.
            device: Where the tensors go.
        """
        flat = Flat.of(examples)
        placing = self.place(examples, flat) if examples else Placing((1, EMPTY), flat.position, None)
        size = placing.shape[0] * placing.shape[1]
        tokens, real, positions = np.full(size, pad), np.zeros(size, bool), np.zeros(size, np.int64)
        tokens[placing.place], real[placing.place], positions[placing.place] = (
            flat.tokens,
            True,
            flat.position,
        )
        predicted = np.flatnonzero(flat.supervised)
        sequence = flat.sequence[predicted]

        def tensor(array: NDArray[Any], *shape: int) -> torch.Tensor:
            return torch.from_numpy(array).view(shape or -1).to(device)

        return MicroBatch(
            examples=examples,
            tokens=tensor(tokens, *placing.shape),
            real=tensor(real, *placing.shape),
            positions=tensor(positions, *placing.shape),
            selected=tensor(placing.place[predicted - ~flat.own[sequence]]),
            targets=tensor(flat.tokens[predicted]),
            sequence=tensor(sequence),
            lengths=tensor(np.bincount(sequence, minlength=len(flat.lengths))),
            weight=tensor(np.array([example.weight for example in examples], np.float32)),
            segments=placing.segments,
            pixels=_pixels(examples, placing, device),
        )


def _pixels(
    examples: Sequence[Example], placing: Placing, device: torch.device | str
) -> dict[str, torch.Tensor] | None:
    if not any(sequence.images for example in examples for sequence in example.sequences):
        return None
    sequences = [sequence for example in examples for sequence in example.sequences]
    return seen(sequences, placing.place, placing.shape, placing.segments is not None, device)
