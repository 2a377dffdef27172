"""The attention of a row of segments as a few dense calls on blocks of segments of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain_plugins.training.microbatch import Segments

Integers = NDArray[np.int64]

CALL = 2000
"""Scores (query times key, all heads together) that cost as much as one more call of the attention kernel.

On a CPU a call costs about 0.1 ms forward and backward and a score 58 ns at 8 heads of 32; the kernel takes no
less time for a batch than for its rows one by one, so there is nothing else to gain by batching.
"""
PIECE = 128
"""Tokens of a piece on a CPU: longer segments are cut, so that less is computed above the diagonal and thrown away."""
MASK = 1 << 20
"""Elements of the largest mask that differs from piece to piece; beyond, only equal ones form a block."""


@dataclass(frozen=True)
class Block:
    """Pieces that one call attends for: Q queries against P keys of what each continues, then Q own keys.

    Args:
        count: Pieces.
        queries: Q, the longest.
        inherited: P, the longest prefix; 0 where the pieces continue nothing.
        prefix: Length of the prefix of each, shape [count].
    """

    count: int
    queries: int
    inherited: int
    prefix: Integers

    @property
    def keys(self) -> int:
        """P + Q."""
        return self.inherited + self.queries

    def causal(self, window: int | None) -> bool:
        """Whether a plain causal mask says it all: padding follows the tokens, so none of them sees it."""
        return not self.inherited and (window is None or window >= self.queries)

    def visible(self, window: int | None) -> NDArray[np.bool_]:
        """Return which key each query sees, shape [count or 1, 1, Q, P + Q], by their positions.

        Args:
            window: How many positions a query looks back, its own included; None: all.
        """
        prefix = self.prefix[:1] if (self.prefix == self.prefix[0]).all() else self.prefix
        prefix = prefix[:, None, None, None]
        index = np.arange(self.keys)
        inherited = index < self.inherited
        position = np.where(inherited, index, prefix + index - self.inherited)
        query = prefix + np.arange(self.queries)[:, None]
        seen: NDArray[np.bool_] = (position <= query) & (~inherited | (index < prefix))
        return seen if window is None else seen & (query - position < window)


@dataclass(frozen=True)
class Plan:
    """How to attend in a row of T tokens.

    Args:
        blocks: The calls.
        queries: Index of the row's tokens that are the blocks' queries, Σ count·Q of them.
        keys: Index of the tokens that are their keys and values, Σ count·(P + Q).
        back: Where each token of the row is among the queries, shape [T].
        device: Where masks go.
    """

    blocks: Sequence[Block]
    queries: Tensor
    keys: Tensor
    back: Tensor
    device: torch.device
    _masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores of a block: 0 where a query sees a key, else the lowest number."""
        key = (number, window, dtype)
        if key not in self._masks:
            seen = torch.from_numpy(self.blocks[number].visible(window)).to(self.device)
            lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=self.device)
            self._masks[key] = torch.where(seen, torch.zeros_like(lowest), lowest)
        return self._masks[key]


@dataclass(frozen=True)
class _Pieces:
    """Runs of tokens of a segment; each sees the segment's prefix and earlier tokens, then its own. Shape [P].

    Args:
        start: The segment's first token.
        root: First token of what the segment continues.
        prefix: Tokens of what it continues, or 0.
        offset: Tokens of the segment before the piece.
        length: Tokens of the piece.
    """

    start: Integers
    root: Integers
    prefix: Integers
    offset: Integers
    length: Integers

    @classmethod
    def of(cls, segments: Segments, most: int) -> _Pieces:
        """Cut segments into pieces of at most `most` tokens; those without tokens have no pieces."""
        start, length, parent = map(np.asarray, (segments.start, segments.length, segments.parent))
        counts = -(-length // most)
        of = np.repeat(np.arange(len(length)), counts)
        offset = most * (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts))
        # What is continued is a segment that continues nothing; the appended 0 is what −1 refers to.
        root, prefix = np.append(start, 0)[parent], np.append(length, 0)[parent]
        return cls(start[of], root[of], prefix[of], offset, np.minimum(most, length[of] - offset))

    @property
    def inherited(self) -> Integers:
        """Tokens that a piece sees beside its own."""
        return self.prefix + self.offset

    def __getitem__(self, members: list[int]) -> _Pieces:
        return _Pieces(*(getattr(self, each.name)[members] for each in fields(self)))

    def block(self) -> tuple[Block, Integers, Integers]:
        """Return the block of these pieces, and the places of its queries and keys, each piece's in a row.

        Beyond a piece's end its last token is repeated: any would do, as no query sees it.
        """
        most, inherited = int(self.length.max()), int(self.inherited.max())
        own = (self.start + self.offset)[:, None] + np.minimum(np.arange(most), self.length[:, None] - 1)
        before = np.minimum(np.arange(inherited), self.inherited[:, None] - 1)
        prefix = self.prefix[:, None]
        above = np.where(before < prefix, self.root[:, None] + before, self.start[:, None] + before - prefix)
        block = Block(len(own), most, inherited, self.inherited)
        return block, own, np.concatenate([above, own], axis=1)


def plan(segments: Segments, device: torch.device) -> Plan:
    """Cut segments into pieces and group these into blocks; there is at least one token."""
    pieces = _Pieces.of(segments, PIECE if device.type == "cpu" else int(max(segments.length)))
    groups = _groups(pieces.length, pieces.inherited)
    blocks, queries, keys = zip(*(pieces[members].block() for members in groups), strict=True)
    asked = np.concatenate([each.ravel() for each in queries])
    back = np.empty(int(pieces.length.sum()), np.int64)
    # The result of a token is that of its first copy, so that one is written last.
    back[asked[::-1]] = np.arange(len(asked))[::-1]

    def tensor(array: Integers) -> Tensor:
        return torch.from_numpy(array).to(device)

    every_key = np.concatenate([each.ravel() for each in keys])
    return Plan(blocks, tensor(asked), tensor(every_key), tensor(back), device)


def _groups(length: Integers, prefix: Integers) -> list[list[int]]:
    """Group pieces that continue something and those that do not, longest first, where it saves time."""
    groups: list[list[int]] = []
    queries = keys = inherited = 0
    equal = True
    order = np.lexsort((-length, -prefix))
    for member in order[length[order] > 0].tolist():
        own, above = int(length[member]), int(prefix[member])
        if groups and bool(above) == bool(inherited):
            wide, deep = max(queries, own), max(inherited, above)
            size, same = len(groups[-1]) + 1, equal and above == inherited
            waste = size * wide * (deep + wide) - (size - 1) * queries * keys - own * (above + own)
            if waste < CALL and (same or size * wide * (deep + wide) <= MASK):
                groups[-1].append(member)
                queries, inherited, keys, equal = wide, deep, deep + wide, same
                continue
        groups.append([member])
        queries, inherited, keys, equal = own, above, above + own, True
    return groups
