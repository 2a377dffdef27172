"""The pixels of a micro-batch: what a vision-language model is called with beside tokens.

Each image goes through the model's own image processor by itself, so what the model sees of a row does not depend
on the rows beside it. transformers puts the features of all images, in order, where the image tokens of all rows
are; so images are ordered by the place of their tokens, and those that sequences share are given once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.contracts.trainer import TokenSequence
from posttrain.errors import StageError
from posttrain_plugins.data.images.image import opened
from posttrain_plugins.templates.vision import Placed

Integers = NDArray[np.int64]
Features = Mapping[str, Tensor]

OPEN = 4
"""Image processors kept for reuse."""
JOINED: Mapping[str, int] = {"llava": 0, "idefics3": 1, "smolvlm": 1, "qwen2_vl": 0, "qwen2_5_vl": 0}
"""The axis along which the features of images follow each other, by family."""


def seen(
    sequences: Sequence[TokenSequence],
    place: Integers,
    shape: tuple[int, int],
    restarts: bool,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Return what the model is given for the images of a micro-batch.

    Args:
        sequences: The sequences; at least one has an image.
        place: Index into the flattened rows of each of their tokens, one sequence after the other.
        shape: Rows and tokens of a row.
        restarts: Whether a row holds several sequences, so that the model has to be told where they begin.
        device: Where the tensors go.

    Raises:
        StageError: The tokens of an image do not lie side by side, or an image no longer has its size.
    """
    starts = np.cumsum([0, *(len(each.tokens) for each in sequences[:-1])]).tolist()
    found: dict[int, tuple[Placed, Features]] = {}
    features: list[list[Features]] = []
    for start, sequence in zip(starts, sequences, strict=True):
        own = []
        for placed in sequence.images:
            at = _begin(place[start + placed.start : start + placed.end])
            if at not in found:
                found[at] = placed, processed(placed.vision.directory, placed.image.path)
            own.append(found[at][1])
        features.append(own)
    ordered = [found[at] for at in sorted(found)]
    family = ordered[0][0].vision.family
    given = {
        name: torch.cat([each[name] for _, each in ordered], JOINED[family]).to(device)
        for name in ordered[0][1]
    }
    positions = POSITIONS.get(family)
    if positions is not None:
        flat = np.concatenate([positions(*each) for each in zip(sequences, features, strict=True)], axis=1)
        given["position_ids"] = _rows(flat, place, shape, restarts).to(device)
    return given


@lru_cache(maxsize=OPEN)
def processor(directory: Path) -> Any:
    """Return the image processor of a model directory, the one that works without torchvision."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")


def processed(directory: Path, path: Path) -> Features:
    """Return what a model's image processor makes of an image file."""
    own = processor(directory)
    found = own(images=[opened(path)], return_tensors="pt")
    return {name: found[name] for name in own.model_input_names if name in found}


def _begin(places: Integers) -> int:
    if int(places[-1]) - int(places[0]) != len(places) - 1:
        raise StageError(
            "the tokens of an image are torn apart", where="layout", fix="use the layout `padded`"
        )
    return int(places[0])


def _rows(flat: Integers, place: Integers, shape: tuple[int, int], restarts: bool) -> Tensor:
    """Lay positions of several axes out, shape [axes, B, T]; padding is at 0.

    Where sequences restart in a row, positions in the text come first: by these a model tells sequences apart.
    """
    rows = np.zeros((len(flat), shape[0] * shape[1]), np.int64)
    rows[:, place] = flat
    return torch.from_numpy(rows if restarts else rows[1:]).view(-1, *shape)


def _grid_positions(sequence: TokenSequence, features: Sequence[Features]) -> Integers:
    """Return the positions of Qwen's models, shape [4, T]: in the text, then in time, height and width.

    A text token is at the same number on all three axes. An image begins where the text stands and counts rows and
    columns from there; the text goes on after the larger of both (https://arxiv.org/abs/2409.12191, section 2.1).
    """
    total = len(sequence.tokens)
    axes = np.zeros((3, total), np.int64)
    done = at = 0
    for placed, feature in zip(sequence.images, features, strict=True):
        text = placed.start - done
        axes[:, done : placed.start] = at + np.arange(text)
        at += text
        _, height, width = (feature["image_grid_thw"][0] // _merge(placed)).tolist()
        if height * width != placed.end - placed.start:
            raise StageError(
                "an image has another size than when its row was tokenized",
                where=str(placed.image.path),
                found=f"{height * width} tokens",
                expected=f"{placed.end - placed.start}",
            )
        axes[:, placed.start : placed.end] = at + np.stack(
            [np.zeros(height * width), *np.divmod(np.arange(height * width), width)]
        )
        at, done = at + max(height, width), placed.end
    axes[:, done:] = at + np.arange(total - done)
    return np.concatenate([np.arange(total)[None], axes])


def _merge(placed: Placed) -> Tensor:
    size = int(processor(placed.vision.directory).merge_size)
    return torch.tensor([1, size, size])


POSITIONS: Mapping[str, Callable[[TokenSequence, Sequence[Features]], Integers]] = {
    "qwen2_vl": _grid_positions,
    "qwen2_5_vl": _grid_positions,
}
"""Families whose tokens have a place on several axes."""
