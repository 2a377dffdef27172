"""What one forward pass is given: the tokens of some examples, laid out in rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.trainer import Example


@dataclass(frozen=True)
class Segments:
    """Which tokens of a row belong together, where a row holds more than one sequence.

    A token attends to the earlier tokens of its own segment and to all tokens of the segments that its own
    continues. Rows are numbered apart from each other: no segment spans two rows.

    Args:
        start: First token of each of the G segments, an index into the flattened rows, ascending.
        length: Tokens of each segment.
        parent: The segment that each one continues (a shared prompt), or −1. A parent comes before its children.
    """

    start: Sequence[int]
    length: Sequence[int]
    parent: Sequence[int]


@dataclass(frozen=True)
class MicroBatch:
    """S sequences of E examples in B rows of T tokens, with N supervised tokens.

    Without examples it is a row of padding from which nothing is selected: a rank that has nothing to do still
    takes part in the collectives of a forward and a backward pass.

    Args:
        examples: The examples; their sequences follow each other in this order.
        tokens: Shape [B, T].
        real: True where a token is not padding, shape [B, T]. From lengths, never from token values.
        positions: Position of each token in its own sequence, shape [B, T]; 0 at padding.
        selected: Index into the flattened rows of the position that predicts each supervised token, or of the token
            itself where a number is read there, shape [N]. The same position may predict the tokens of several
            sequences.
        targets: The supervised tokens, sequence by sequence, shape [N].
        sequence: The sequence of each of them, shape [N], ascending.
        lengths: Supervised tokens of each sequence, shape [S].
        weight: Each example's weight, shape [E].
        segments: Which tokens belong together; None where each row is one sequence, padded on the right.
        pixels: What the model is given for images; None where there are none.
    """

    examples: Sequence[Example]
    tokens: Tensor
    real: Tensor
    positions: Tensor
    selected: Tensor
    targets: Tensor
    sequence: Tensor
    lengths: Tensor
    weight: Tensor
    segments: Segments | None = None
    pixels: Mapping[str, Tensor] | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model's decoder is called with; a causal model never looks at right padding."""
        given: dict[str, Any] = {"input_ids": self.tokens, "use_cache": False}
        if self.segments is not None:
            given["position_ids"] = self.positions
        if self.pixels is not None:
            given.update(self.pixels)
        return given

    @property
    def predicting(self) -> Tensor:
        """True at the selected positions, shape [B, T]."""
        mask = torch.zeros_like(self.real).view(-1)
        mask[self.selected] = True
        return mask.view_as(self.real)
