"""The documents of a tokenized dataset, found by their number, and gathered into packed rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from posttrain_plugins.data.tokens.packing import Piece
from posttrain_plugins.data.tokens.token_rows import Batch, TokenRows, record_batch

if TYPE_CHECKING:
    import pyarrow as pa


class Documents:
    """Tokenized documents, each of which has a row of its own.

    Attributes:
        rows: Where they are.
        lengths: The tokens of each.
    """

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows
        self.lengths: list[int] = rows.lengths.tolist()
        self._first = [0, *accumulate(len(batch.rows) for batch in rows.batches)]

    def whole(self, document: int) -> Piece:
        """Return all of a document."""
        return Piece(document, 0, self.lengths[document])

    def prompted(self, document: int) -> bool:
        """Whether something stands before the first token that is learned, the beginning of the text aside."""
        return not bool(self._supervised(self.whole(document))[:2].any())

    def learned(self, piece: Piece) -> int:
        """Return how many tokens of a piece can be learned: the first one has nothing before it."""
        return int(np.count_nonzero(self._supervised(piece)[1:]))

    def gather(self, rows: Sequence[Sequence[Piece]]) -> pa.RecordBatch:
        """Return the records of packed rows."""
        pieces = [piece for row in rows for piece in row]
        found = [self._find(piece.document) for piece in pieces]
        lengths = [self._lengths(batch, at, piece) for (batch, at), piece in zip(found, pieces, strict=True)]
        by_piece = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        width = len(self.rows.roles)
        tokens = [self._tokens(piece) for piece in pieces]
        ends = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        return record_batch(
            self.rows.roles,
            np.concatenate(tokens),
            np.concatenate([self._supervised(piece) for piece in pieces]),
            np.concatenate(lengths),
            np.array([batch.weights[at] for batch, at in found]),
            np.array([batch.rows[at] for batch, at in found]),
            [ends[by_piece], by_piece * np.int32(width), by_piece],
        )

    def _find(self, document: int) -> tuple[Batch, int]:
        """Return the batch that holds a document, and its place there."""
        number = bisect_right(self._first, document) - 1
        return self.rows.batches[number], document - self._first[number]

    def _tokens(self, piece: Piece) -> NDArray[np.int32]:
        batch, at = self._find(piece.document)
        start = int(batch.ends[0][at])
        return batch.tokens[start + piece.start : start + piece.stop]

    def _supervised(self, piece: Piece) -> NDArray[np.bool_]:
        batch, at = self._find(piece.document)
        start = int(batch.ends[0][at])
        return batch.supervised(start + piece.start, start + piece.stop)

    def _lengths(self, batch: Batch, at: int, piece: Piece) -> NDArray[np.int32]:
        """Return the tokens of each sequence of a piece; documents of several sequences are never cut."""
        if len(self.rows.roles) == 1:
            return np.array([piece.size], np.int32)
        return batch.lengths[batch.ends[1][at] : batch.ends[1][at + 1]]
