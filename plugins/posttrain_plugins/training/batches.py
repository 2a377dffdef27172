"""From examples to micro-batches: the order of the rows, the cut of a step, right-padded tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from posttrain.contracts.trainer import Example

WASTE = 256
"""Padding tokens that cost about as much as one more forward and backward pass."""


class DataOrder:
    """Which examples make up which optimizer step. An epoch's order depends on seed and number alone.

    Args:
        examples: How many there are.
        batch_size: Examples of a step; the last step of an epoch takes what is left.
        seed: Seed of the order.
        shuffle: Keep the examples' own order when false.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return -(-self.examples // self.batch_size)

    def epoch(self, number: int) -> list[list[int]]:
        """Return the steps of an epoch, each as positions of examples."""
        order = list(range(self.examples))
        if self.shuffle:
            digest = hashlib.sha256(f"order:{self.seed}:{number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            order = torch.randperm(self.examples, generator=generator).tolist()
        return [order[start : start + self.batch_size] for start in range(0, self.examples, self.batch_size)]

    def visited(self, steps: int) -> list[int]:
        """Return the positions that the first `steps` steps visit, ascending."""
        if steps >= self.steps_per_epoch:
            return list(range(self.examples))
        return sorted(position for step in self.epoch(0)[:steps] for position in step)


class StepSampler(torch.utils.data.Sampler[list[int]]):
    """The batch sampler of the training loop: one list of positions a step."""

    def __init__(self, order: DataOrder) -> None:
        self.order, self.number = order, 0

    def set_epoch(self, number: int) -> None:
        """Choose the epoch that the next iteration goes through."""
        self.number = number

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.order.epoch(self.number))

    def __len__(self) -> int:
        return self.order.steps_per_epoch


def predicted(example: Example) -> int:
    """Return the number of supervised tokens of an example's sequences."""
    return sum(sequence.predicted for sequence in example.sequences)


def probe(examples: Sequence[Example]) -> list[Example]:
    """Choose two short examples of different lengths, where there are such."""
    if not examples:
        return []
    first, *others = sorted(examples, key=attrgetter("longest"))
    return [first, *[example for example in others if example.longest > first.longest][:1]]


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold.

    Args:
        tokens: Tokens, padding included.
        supervised: Supervised tokens, each of which needs logits over the whole vocabulary; None: any number.
    """

    tokens: int
    supervised: int | None = None


def cut(examples: Sequence[Example], budget: Budget) -> list[list[Example]]:
    """Cut examples into micro-batches, longest first, so that little is padding and none exceeds the budget.

    An example keeps its sequences together; one that exceeds the budget by itself stands alone. Which
    micro-batch an example is in cannot change the gradient, only memory, time and rounding.

    Args:
        examples: Those of one optimizer step.
        budget: Bounds of a micro-batch.
    """
    limit = math.inf if budget.supervised is None else budget.supervised
    batches: list[list[Example]] = []
    width = rows = waste = scored = 0
    for example in sorted(examples, key=attrgetter("longest"), reverse=True):
        length, count = example.longest, len(example.sequences)
        padding, wanted = (width - length) * count, predicted(example)
        full = (rows + count) * width > budget.tokens or scored + wanted > limit
        if not batches or full or waste + padding > WASTE:
            batches.append([])
            width, rows, waste, padding, scored = length, 0, 0, 0, 0
        batches[-1].append(example)
        rows, waste, scored = rows + count, waste + padding, scored + wanted
    return batches


@dataclass(frozen=True)
class MicroBatch:
    """S sequences of E examples, padded on the right to length T, with N supervised tokens.

    Args:
        examples: The examples; their sequences follow each other in this order.
        tokens: Shape [S, T].
        real: True where a token is not padding, shape [S, T]. From lengths, never from token values.
        predicting: True at positions whose next token is supervised, shape [S, T].
        targets: The supervised tokens, row by row, shape [N].
        sequence: The row of each of them, shape [N].
        weight: Each example's weight, shape [E].
    """

    examples: Sequence[Example]
    tokens: Tensor
    real: Tensor
    predicting: Tensor
    targets: Tensor
    sequence: Tensor
    weight: Tensor


def collate(examples: Sequence[Example], pad: int, device: torch.device) -> MicroBatch:
    """Pad the sequences of some examples into tensors."""
    sequences = [sequence for example in examples for sequence in example.sequences]
    shape = (len(sequences), max(len(sequence.tokens) for sequence in sequences))
    tokens, real, supervised = np.full(shape, pad, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        tokens[row, :length] = sequence.tokens
        real[row, :length] = True
        supervised[row, 1:length] = np.array(list(sequence.supervised[1:]), bool)
    predicting = np.zeros(shape, bool)
    predicting[:, :-1] = supervised[:, 1:]
    return MicroBatch(
        examples=examples,
        tokens=torch.from_numpy(tokens).to(device),
        real=torch.from_numpy(real).to(device),
        predicting=torch.from_numpy(predicting).to(device),
        targets=torch.from_numpy(tokens[supervised]).to(device),
        sequence=torch.from_numpy(np.nonzero(supervised)[0]).to(device),
        weight=torch.tensor([example.weight for example in examples], dtype=torch.float32, device=device),
    )
