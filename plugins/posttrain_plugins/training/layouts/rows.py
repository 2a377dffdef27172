"""The layouts: padded rows, one packed row, one row in which examples compute their shared prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from posttrain.contracts.trainer import Example
from posttrain_plugins.training.layouts.attention import attending
from posttrain_plugins.training.layouts.blocks import Integers
from posttrain_plugins.training.layouts.layout import Flat, Layout, Placing, filled
from posttrain_plugins.training.microbatch import MicroBatch, Segments


class Padded(Layout):
    """One sequence a row, padded on the right; a causal model never looks at the padding."""

    name = "padded"

    def place(self, examples: Sequence[Example], flat: Flat) -> Placing:
        """Put each sequence in a row of its own."""
        width = int(flat.lengths.max())
        return Placing((len(flat.lengths), width), flat.sequence * width + flat.position, None)

    def _size(self, examples: Sequence[Example]) -> int:
        return max(each.longest for each in examples) * sum(len(each.sequences) for each in examples)


def _rest(tokens: int) -> list[int]:
    """Return the length of the segment that fills a row up, if there has to be one."""
    return [filled(tokens) - tokens] if filled(tokens) > tokens else []


class Packed(Layout):
    """All sequences in one row without padding; each attends to itself alone.

    With flash or flex attention (GPU only) transformers itself tells sequences apart by their positions.
    """

    name = "packed"

    def place(self, examples: Sequence[Example], flat: Flat) -> Placing:
        """Put the sequences one after the other."""
        total = len(flat.tokens)
        lengths = [*flat.lengths.tolist(), *_rest(total)]
        start = np.cumsum([0, *lengths[:-1]]).tolist()
        segments = Segments(start, lengths, [-1] * len(lengths))
        return Placing((1, filled(total)), np.arange(total), segments)

    def load(self, example: Example) -> int:
        """All its tokens."""
        return example.size

    def _size(self, examples: Sequence[Example]) -> int:
        return filled(sum(map(self.load, examples)))

    def attending(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        """Keep sequences apart."""
        return attending(model, micro, trees=False)


class SharedPrefix(Layout):
    """One row without padding in which the sequences of an example share what they begin with.

    The longest common prefix of an example's sequences is one segment; what follows it in each sequence is a
    segment that continues it, with positions that go on from the prefix. The last token of a sequence is
    always its own. Not for flash and flex attention.
    """

    name = "shared_prefix"

    def place(self, examples: Sequence[Example], flat: Flat) -> Placing:
        """Put each example's prefix before what follows it in its sequences."""
        segments: list[tuple[int, int, int]] = []
        sequences: list[tuple[int, int, int]] = []
        end = 0
        for example in examples:
            shared, root, above = example.prefix, end, -1
            if shared:
                above = len(segments)
                segments.append((root, shared, -1))
                end += shared
            for sequence in example.sequences:
                rest = len(sequence.tokens) - shared
                segments.append((end, rest, above))
                sequences.append((shared, root, end - shared))
                end += rest
        prefixes, roots, rests = np.array(sequences, np.int64)[flat.sequence].T
        place: Integers = np.where(flat.position < prefixes, roots, rests) + flat.position
        segments += [(end, rest, -1) for rest in _rest(end)]
        return Placing((1, filled(end)), place, Segments(*zip(*segments, strict=True)))

    def load(self, example: Example) -> int:
        """Its tokens, those that its sequences share once."""
        return example.size - example.prefix * (len(example.sequences) - 1)

    def _size(self, examples: Sequence[Example]) -> int:
        return filled(sum(map(self.load, examples)))

    def attending(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        """Keep sequences apart, and let each see its prefix."""
        return attending(model, micro, trees=True)
