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
from posttrain_plugins.data.tokens.packing import best_fit

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
        packs: The positions of the examples that each packed row holds; None where a row is an example. Then
            `batch_size` counts rows, and what a row holds comes in one step.
    """

    def __init__(
        self,
        examples: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        packs: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle
        self.packs = packs
        self.rows = examples if packs is None else len(packs)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return -(-self.rows // self.batch_size)

    def epoch(self, number: int) -> list[list[int]]:
        """Return the steps of an epoch, each as positions of examples."""
        order = list(range(self.rows))
        if self.shuffle:
            digest = hashlib.sha256(f"order:{self.seed}:{number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            order = torch.randperm(self.rows, generator=generator).tolist()
        steps = [order[start : start + self.batch_size] for start in range(0, self.rows, self.batch_size)]
        if self.packs is None:
            return steps
        return [[position for row in step for position in self.packs[row]] for step in steps]

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
    """Choose two short examples of different lengths and one with images, where there are such; take a piece of each.

    The pieces hold the first supervised tokens: all logits of a long answer would take more memory than a step.
    """
    if not examples:
        return []
    first, *others = sorted(examples, key=attrgetter("longest"))
    longer = [example for example in others if example.longest > first.longest][:1]
    # A longer example keeps a longer piece where there is one, so that one of the rows is padded.
    most = PIECE if first.longest < PIECE else PIECE - 1
    chosen = [_pieces(first, PIECE), *[_pieces(example, most) for example in longer]]
    if any(_sees(example) for example in chosen):
        return chosen
    seeing = next(filter(_sees, others), None)
    return chosen if seeing is None else [*chosen, _pieces(seeing, most)]


def _sees(example: Example) -> bool:
    return any(sequence.images for sequence in example.sequences)


def _pieces(example: Example, most: int) -> Example:
    return replace(example, sequences=tuple(_piece(sequence, most) for sequence in example.sequences))


def _piece(sequence: TokenSequence, most: int) -> TokenSequence:
    """Take at most so many tokens of a sequence, around its first supervised one; or from its last image on."""
    if sequence.images:
        return _last_image(sequence, most)
    first = next((at for at, counts in enumerate(sequence.supervised) if counts and at), 0)
    start = max(0, min(first - most // 2, len(sequence.tokens) - most))
    kept = slice(start, start + most)
    return replace(sequence, tokens=sequence.tokens[kept], supervised=sequence.supervised[kept])


def _last_image(sequence: TokenSequence, most: int) -> TokenSequence:
    """Take the last image of a sequence and what follows it, with so many tokens from the first supervised one on."""
    last = sequence.images[-1]
    after = (at for at in range(last.end, len(sequence.tokens)) if sequence.supervised[at])
    kept = slice(last.start, next(after, last.end) + most)
    moved = replace(last, start=0, end=last.end - last.start)
    tokens, supervised = sequence.tokens[kept], sequence.supervised[kept]
    return replace(sequence, tokens=tokens, supervised=supervised, images=(moved,))


class Sized(Protocol):
    """What a cut must know of a layout."""

    def size(self, examples: Sequence[Example]) -> int:
        """Return the tokens, padding included, of a micro-batch of these examples."""

    def load(self, example: Example) -> int | None:
        """Return what an example adds to that whatever else is there; None where that depends on the others."""

    def room(self, tokens: int) -> int:
        """Return how much may be added up in a micro-batch of at most so many tokens."""


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
    """Cut examples into micro-batches, so that there are few, little is padding and none exceeds the budget.

    Where a layout pads, similar lengths come together, the longest first. Where it does not, examples are packed by
    best-fit-decreasing. An example keeps its sequences together; one that exceeds the budget by itself stands alone.
    Which micro-batch an example is in cannot change the gradient, only memory, time and rounding.

    Args:
        examples: Those of one optimizer step.
        layout: How large a micro-batch of some examples is.
        budget: Bounds of a micro-batch.
    """
    ordered = sorted(examples, key=attrgetter("longest"), reverse=True)
    loads = [load for example in ordered if (load := layout.load(example)) is not None]
    if len(loads) == len(ordered):
        predicted = [example.predicted for example in ordered]
        bins = best_fit(loads, layout.room(budget.tokens), predicted, budget.supervised)
        return [[ordered[item] for item in sorted(part)] for part in bins]
    limit = math.inf if budget.supervised is None else budget.supervised
    parts: list[list[Example]] = []
    for example in ordered:
        if not parts or _full([*parts[-1], example], layout, budget.tokens, limit):
            parts.append([])
        parts[-1].append(example)
    return parts


def fullness(steps: Sequence[Sequence[Example]], layout: Sized, budget: Budget) -> float:
    """Return the share of the places in the micro-batches of some steps that hold a token."""
    parts = [part for step in steps for part in cut(step, layout, budget)]
    loads = [layout.load(example) or example.size for part in parts for example in part]
    return sum(loads) / max(1, sum(map(layout.size, parts)))


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
            roles=_by_role(examples),
        )
        object.__setattr__(self, "counts", counts)

    @property
    def examples(self) -> list[Example]:
        """All examples of the step, by round and rank."""
        return [example for parts in self.rounds for part in parts for example in part]

    def done(self, rounds: int) -> int:
        """How many examples all ranks have computed after so many rounds."""
        return sum(len(part) for parts in self.rounds[:rounds] for part in parts)

    def of(self, rank: int) -> list[Sequence[Example]]:
        """Return the micro-batches of one rank."""
        return [parts[rank] for parts in self.rounds]


def _by_role(examples: Sequence[Example]) -> dict[str, int]:
    """Count the supervised tokens of the sequences of each role."""
    found: dict[str, int] = {}
    for example in examples:
        for sequence in example.sequences:
            found[sequence.role] = found.get(sequence.role, 0) + sequence.predicted
    return found


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
