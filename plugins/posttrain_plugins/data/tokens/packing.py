"""Packing: which documents share a row. Plain numbers in, plain numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a document."""

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many tokens it has."""
        return self.stop - self.start


def best_fit(
    sizes: Sequence[int],
    capacity: int,
    others: Sequence[int] | None = None,
    limit: int | None = None,
) -> list[list[int]]:
    """Put items into bins, the largest first, each into the fullest bin that still takes it.

    Best-fit-decreasing needs at most 11/9 of the fewest bins possible, and one (Johnson 1973). Rooms are kept in one
    set of bits, of which bit r says that some bin has room r, so that it takes n log n steps. With two limits, an
    item is as large, and a bin as full, as the tighter one says.

    Args:
        sizes: Of each item; one above the capacity gets a bin of its own.
        capacity: What a bin holds.
        others: A second size of each item.
        limit: What a bin holds of that; None: any amount.

    Returns:
        The items of each bin; the first bin holds the largest item.
    """
    second: Sequence[int] = [0] * len(sizes) if others is None or limit is None else others
    most = limit or 1
    loads = [max(size, -(-other * capacity // most)) for size, other in zip(sizes, second, strict=True)]
    bins: list[list[int]] = []
    used: list[tuple[int, int]] = []
    rooms: dict[int, list[int]] = {}
    bits = 0
    for item in sorted(range(len(sizes)), key=loads.__getitem__, reverse=True):
        rest = bits >> loads[item]
        if rest:
            room = loads[item] + (rest & -rest).bit_length() - 1
            place = rooms[room].pop()
            if not rooms[room]:
                del rooms[room]
                bits ^= 1 << room
        else:
            place = len(bins)
            bins.append([])
            used.append((0, 0))
        bins[place].append(item)
        size, other = used[place] = used[place][0] + sizes[item], used[place][1] + second[item]
        room = min(capacity - size, (most - other) * capacity // most)
        if room > 0:
            rooms.setdefault(room, []).append(place)
            bits |= 1 << room
    return bins


def split(lengths: Iterable[int], capacity: int) -> Iterator[Piece]:
    """Cut documents that are longer than a row into pieces of a whole row and what is left."""
    for document, length in enumerate(lengths):
        for start in range(0, length, capacity):
            yield Piece(document, start, min(start + capacity, length))


def wrap(lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Put documents one after the other and cut wherever a row is full."""
    rows: list[list[Piece]] = []
    ends = accumulate(lengths)
    for document, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        begin = start = end - length
        while start < end:
            row, used = divmod(start, capacity)
            stop = min(end, start + capacity - used)
            if row == len(rows):
                rows.append([])
            rows[row].append(Piece(document, start - begin, stop - begin))
            start = stop
    return rows


def efficiency(tokens: int, rows: int, capacity: int) -> float:
    """Return the share of all rows' places that hold a token."""
    return tokens / (rows * capacity) if rows else 1.0
