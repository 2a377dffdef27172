"""The steps of a training: which examples each takes, and how they are cut and dealt to ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

import torch

from posttrain.contracts.reduction import Counts
from posttrain.contracts.trainer import Example, TokenSequence

WASTE = 256
"""Padding tokens that cost about as much as one more forward and backward pass."""
PIECE = 32
"""Tokens of a sequence that head and layout are tried on."""


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


def probe(examples: Sequence[Example]) -> list[Example]:
    """Choose two short examples of different lengths, where there are such, and take a piece of each.

    The pieces hold the first supervised tokens: all logits of a long answer would take more memory than a step.
    """
    if not examples:
        return []
    first, *others = sorted(examples, key=attrgetter("longest"))
    longer = [example for example in others if example.longest > first.longest][:1]
    # A longer example keeps a longer piece where there is one, so that one of the rows is padded.
    most = PIECE if first.longest < PIECE else PIECE - 1
    return [_pieces(first, PIECE), *[_pieces(example, most) for example in longer]]


def _pieces(example: Example, most: int) -> Example:
    return replace(example, sequences=tuple(_piece(sequence, most) for sequence in example.sequences))


def _piece(sequence: TokenSequence, most: int) -> TokenSequence:
    """Take at most so many tokens of a sequence, around its first supervised one."""
    first = next((at for at, counts in enumerate(sequence.supervised) if counts and at), 0)
    start = max(0, min(first - most // 2, len(sequence.tokens) - most))
    kept = slice(start, start + most)
    return replace(sequence, tokens=sequence.tokens[kept], supervised=sequence.supervised[kept])


class Sized(Protocol):
    """What a cut must know of a layout."""

    def size(self, examples: Sequence[Example]) -> int:
        """Return the tokens, padding included, of a micro-batch of these examples."""


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold.

    Args:
        tokens: Tokens, padding included.
        supervised: Supervised tokens, each of which needs logits over the whole vocabulary; None: any number.
    """

    tokens: int
    supervised: int | None = None

    @property
    def half(self) -> Budget:
        """Half of it, at least one of each."""
        supervised = None if self.supervised is None else max(1, self.supervised // 2)
        return Budget(max(1, self.tokens // 2), supervised)


def cut(examples: Sequence[Example], layout: Sized, budget: Budget) -> list[list[Example]]:
    """Cut examples into micro-batches, longest first, so that little is padding and none exceeds the budget.

    An example keeps its sequences together; one that exceeds the budget by itself stands alone. Which
    micro-batch an example is in cannot change the gradient, only memory, time and rounding.

    Args:
        examples: Those of one optimizer step.
        layout: How large a micro-batch of some examples is.
        budget: Bounds of a micro-batch.
    """
    limit = math.inf if budget.supervised is None else budget.supervised
    parts: list[list[Example]] = []
    for example in sorted(examples, key=attrgetter("longest"), reverse=True):
        if not parts or _full([*parts[-1], example], layout, budget.tokens, limit):
            parts.append([])
        parts[-1].append(example)
    return parts


def _full(part: Sequence[Example], layout: Sized, tokens: int, limit: float) -> bool:
    """Whether a micro-batch with its newest example would be too large, or mostly padding."""
    size = layout.size(part)
    return (
        size > tokens
        or size - sum(example.size for example in part) > WASTE
        or sum(example.predicted for example in part) > limit
    )


@dataclass(frozen=True)
class Deal:
    """The micro-batches of one step on all ranks: `rounds[k][r]` is what rank r computes in its k-th.

    Every rank has as many as any other, since collectives wait for all; some may be empty.
    """

    rounds: Sequence[Sequence[Sequence[Example]]]
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        examples = self.examples
        counts = Counts(
            tokens=sum(example.predicted for example in examples),
            sequences=sum(len(example.sequences) for example in examples),
            examples=len(examples),
        )
        object.__setattr__(self, "counts", counts)

    @property
    def examples(self) -> list[Example]:
        """All examples of the step, by round and rank."""
        return [example for parts in self.rounds for part in parts for example in part]

    def of(self, rank: int) -> list[Sequence[Example]]:
        """Return the micro-batches of one rank."""
        return [parts[rank] for parts in self.rounds]


def deal(examples: Sequence[Example], layout: Sized, budget: Budget, ranks: int) -> Deal:
    """Cut a step and deal it to ranks, about as much to each. Depends on known lengths alone: every rank agrees.

    Args:
        examples: Those of one optimizer step, on all ranks.
        layout: How large a micro-batch of some examples is.
        budget: Bounds of a micro-batch.
        ranks: How many ranks there are.
    """
    parts = cut(examples, layout, budget)
    while len(parts) % ranks:
        parts = _one_more(parts, layout)
    parts.sort(key=layout.size, reverse=True)
    rounds = [parts[start : start + ranks] for start in range(0, len(parts), ranks)]
    # Every other round is dealt backwards, so that no rank always gets the largest.
    return Deal([dealt[::-1] if number % 2 else dealt for number, dealt in enumerate(rounds)])


def _one_more(parts: list[list[Example]], layout: Sized) -> list[list[Example]]:
    """Split the largest micro-batch that holds several examples; add an empty one where there is none."""
    several = [part for part in parts if len(part) > 1]
    if not several:
        return [*parts, []]
    largest = max(several, key=layout.size)
    half, first = sum(example.size for example in largest) / 2, 1
    while first < len(largest) - 1 and sum(example.size for example in largest[: first + 1]) <= half:
        first += 1
    return [*(part for part in parts if part is not largest), largest[:first], largest[first:]]
