"""Random optimizer steps of every family, token by token, and the batches that they make.

Numbers are drawn for tokens, as the policy gives them. Sums over answers come from those, so the gradient with respect
to each token is known. Rows can be taken out, put into another order, or given other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import Family, Need
from posttrain.contracts.reduction import Counts, Part
from posttrain.registry.validation import HELD
from posttrain_plugins.testing.layout import BUILDERS, LEARNED, ROLES, mismatched_batch

Columns = Mapping[str, Tensor]
IMPLIED: Mapping[Need, frozenset[Need]] = {Need.REFERENCE: frozenset({Need.REFERENCE_TOKENS})}
"""What is known anyway where something else is declared: sums, where each token's log-prob is."""


@dataclass(frozen=True)
class Draw:
    """The numbers of E examples with S sequences and N supervised tokens.

    Args:
        family: Which batch they make.
        needs: What the loss declares; the batch holds nothing else beside log-probs.
        sequence: The sequence of each token, shape [N], ascending.
        owner: The example of each sequence, shape [S], ascending.
        tokens: Numbers of tokens, shape [N] each: `logp`, `reference`, `entropy`, `squares`, `mean_logp`, `top1`;
            `value` and `label` of models that give numbers.
        sequences: Numbers of sequences, shape [S] each: `score`.
        rows: Numbers of examples, shape [E] each: `weight`, `margin`, `desirable`, `own`, `preference`; and
            `mismatched` and `reference_mismatched` where `matched`.
        lavish: Whether the batch holds everything that it can, declared or not.
    """

    family: Family
    needs: frozenset[Need]
    sequence: Tensor
    owner: Tensor
    tokens: Columns
    sequences: Columns
    rows: Columns
    lavish: bool = False

    @property
    def size(self) -> int:
        """E."""
        return len(self.rows["weight"])

    @cached_property
    def lengths(self) -> Tensor:
        """Supervised tokens of each sequence, shape [S]."""
        return torch.bincount(self.sequence, minlength=len(self.owner))

    @cached_property
    def place(self) -> Tensor:
        """Number of each token in its sequence, from 0, shape [N]."""
        first = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.sequence)) - first[self.sequence]

    @cached_property
    def answer(self) -> Tensor:
        """Number of each sequence in its example, from 0, shape [S]."""
        count = torch.bincount(self.owner, minlength=self.size)
        return torch.arange(len(self.owner)) - (count.cumsum(0) - count)[self.owner]

    @property
    def learned(self) -> tuple[str, ...]:
        """The token columns that a loss may send a gradient to."""
        return tuple(name for name, need in LEARNED[self.family] if need is None or need in self.needs)

    @property
    def counts(self) -> Counts:
        """The denominators of a step of nothing but these rows."""
        held = self.lengths.tolist()
        roles: dict[str, int] = {}
        for length, answer in zip(held, self.answer.tolist(), strict=True):
            role = ROLES[self.family][min(answer, len(ROLES[self.family]) - 1)]
            roles[role] = roles.get(role, 0) + length
        return Counts(sum(held), len(held), self.size, roles)

    def shows(self, need: Need) -> bool:
        """Whether the batch holds something that not every loss is given."""
        return self.lavish or need in self.needs or bool(IMPLIED.get(need, frozenset()) & self.needs)

    def totals(self, name: str) -> Tensor:
        """Sum a token column over each sequence, shape [S]."""
        values = self.tokens[name]
        return values.new_zeros(len(self.owner)).index_add(0, self.sequence, values)

    def batch(self) -> Any:
        """Return the batch that a trainer of the family would make."""
        return BUILDERS[self.family](self)

    def measured(self) -> Any:
        """Return the batch that `measure` gets to see; None where these rows have nothing to measure.

        What the loss compares other rows' answers with is scored in a pass of its own, in which the answers themselves
        are not known.
        """
        if self.family is not Family.UNPAIRED or Need.MISMATCHED not in self.needs:
            return self.batch()
        matched = self.rows["matched"].nonzero()[:, 0].tolist()
        return mismatched_batch(self.take(matched)) if matched else None

    def part(self, step: Counts | None = None) -> Part:
        """Return these rows as reductions see them, as a part of a step."""
        return Part(self.sequence, self.lengths, self.size, step or self.counts)

    def with_leaves(self) -> tuple[Draw, tuple[Tensor, ...]]:
        """Return these numbers with gradient, and the leaves, in the order of `learned`."""
        leaves = {name: self.tokens[name].detach().clone().requires_grad_() for name in self.learned}
        return self.with_tokens(**leaves), tuple(leaves.values())

    def with_tokens(self, **columns: Tensor) -> Draw:
        """Return these rows with other numbers of tokens."""
        return replace(self, tokens={**self.tokens, **columns})

    def with_rows(self, **columns: Tensor) -> Draw:
        """Return these examples with other numbers."""
        return replace(self, rows={**self.rows, **columns})

    def with_sequences(self, **columns: Tensor) -> Draw:
        """Return these sequences with other numbers."""
        return replace(self, sequences={**self.sequences, **columns})

    def take(self, order: Sequence[int]) -> Draw:
        """Return some of the examples, in this order."""
        sequences, tokens = self.places(order)
        owners = [at for at, example in enumerate(order) for _ in range(int((self.owner == example).sum()))]
        lengths = self.lengths[sequences]
        return replace(
            self,
            sequence=torch.repeat_interleave(lengths),
            owner=torch.tensor(owners, dtype=torch.long),
            tokens={name: values[tokens] for name, values in self.tokens.items()},
            sequences={name: values[sequences] for name, values in self.sequences.items()},
            rows={name: values[list(order)] for name, values in self.rows.items()},
        )

    def places(self, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the indices of the sequences and of the tokens of some examples, example by example."""
        sequences = torch.cat([(self.owner == example).nonzero()[:, 0] for example in order])
        tokens = torch.cat([(self.sequence == each).nonzero()[:, 0] for each in sequences.tolist()])
        return sequences, tokens

    def belongs(self, values: Tensor) -> Tensor | None:
        """Return the example of each of a term's values; None where they are as many as nothing is."""
        by_size = {
            self.size: torch.arange(self.size),
            len(self.owner): self.owner,
            len(self.sequence): self.owner[self.sequence],
        }
        return by_size.get(len(values)) if values.dim() == 1 else None

    def to(self, dtype: torch.dtype) -> Draw:
        """Return the same numbers in another precision."""

        def cast(columns: Columns) -> dict[str, Tensor]:
            return {
                name: each.to(dtype) if each.is_floating_point() else each for name, each in columns.items()
            }

        return replace(self, tokens=cast(self.tokens), sequences=cast(self.sequences), rows=cast(self.rows))


def draw(
    family: Family,
    needs: frozenset[Need] = frozenset(),
    seed: int = 0,
    examples: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Draw:
    """Draw a step of ordinary numbers: short answers, about a nat a token, references nearby, weights above 0.

    Args:
        family: Of the loss.
        needs: What the loss declares.
        seed: Another seed, other numbers.
        examples: How many rows.
        dtype: Of all floating-point numbers.
    """
    source = _Source(seed)
    owner = torch.repeat_interleave(_widths(family, needs, source.whole(2, 5, examples)))
    count = len(owner)
    lengths = torch.ones(count, dtype=torch.long) if family is Family.REWARD else source.whole(1, 5, count)
    sequence = torch.repeat_interleave(lengths)
    plain = Draw(
        family=family,
        needs=needs,
        sequence=sequence,
        owner=owner,
        tokens=_tokens(source, len(sequence)),
        sequences={"score": source.uniform(0.0, 5.0, count)},
        rows=_rows(source, examples),
    )
    if family is Family.REWARD and Need.RIVALS not in needs:
        plain = plain.with_sequences(score=(plain.answer == 0).double())
    return plain.to(dtype)


class _Source:
    """Random numbers by a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float, size: int) -> Tensor:
        """Return numbers from `low` to `high`, shape [size]."""
        return low + (high - low) * torch.rand(size, generator=self._generator, dtype=torch.float64)

    def whole(self, low: int, high: int, size: int) -> Tensor:
        """Return whole numbers from `low` to below `high`, shape [size]."""
        return torch.randint(low, high, (size,), generator=self._generator)


def _tokens(source: _Source, size: int) -> dict[str, Tensor]:
    """Draw the numbers of tokens."""
    logp, label = source.uniform(-2.0, -0.1, size), source.uniform(0, 1, size)
    return {
        "logp": logp,
        "reference": (logp + source.uniform(-0.5, 0.5, size)).clamp(max=-0.01),
        "entropy": source.uniform(0.1, 3.0, size),
        "squares": source.uniform(0.05, 0.9, size),
        "mean_logp": logp - source.uniform(0.1, 3.0, size),
        "top1": source.uniform(0, 1, size) < 0.5,
        "value": source.uniform(-2.0, 2.0, size),
        # Every third label is soft.
        "label": torch.where(torch.arange(size) % 3 == 0, label, label.round()),
    }


def _rows(source: _Source, examples: int) -> dict[str, Tensor]:
    """Draw the numbers of examples."""
    return {
        "weight": source.uniform(0.5, 2.0, examples),
        "margin": source.uniform(-0.5, 1.0, examples).clamp(min=0),
        "desirable": torch.arange(examples) % 2 == 0,
        # Every third row has no other row's answer to compare with.
        "matched": torch.arange(examples) % 3 != 2,
        "mismatched": source.uniform(-4.0, -2.0, examples),
        "reference_mismatched": source.uniform(-6.0, -3.0, examples),
        # Every third chosen answer is another's.
        "own": torch.arange(examples) % 3 != 2,
        "preference": source.uniform(0.0, 1.0, examples),
    }


def make_batch(
    family: Family,
    seed: int = 0,
    examples: int = 4,
    dtype: torch.dtype = torch.float64,
    needs: frozenset[Need] = frozenset(Need),
) -> Any:
    """Return a random batch of a family; what the policy says of each token has a gradient.

    Args:
        family: Which one.
        seed: Another seed, other numbers.
        examples: How many rows.
        dtype: Of all floating-point tensors.
        needs: What it holds beside log-probs; everything that the family has, by default.

    Example:
        >>> batch = make_batch(Family.PREFERENCE, seed=1, examples=3)
        >>> batch.margin.shape, batch.tokens.logp.requires_grad
        (torch.Size([3]), True)
    """
    return draw(family, needs & HELD[family], seed, examples, dtype).with_leaves()[0].batch()


def _widths(family: Family, needs: frozenset[Need], several: Tensor) -> Tensor:
    """How many sequences each example has."""
    if family is Family.REWARD and Need.RIVALS in needs:
        return several
    return torch.full_like(several, len(ROLES[family]))
