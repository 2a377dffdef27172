"""Arithmetic on trained tensors by name. A tensor with several names is computed once and stays one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Mapping[str, Tensor]


def copied(weights: Weights) -> dict[str, Tensor]:
    """Return copies under the first name of each tensor."""
    return {name: weights[name].detach().clone() for name in dict.fromkeys(first_names(weights).values())}


def first_names(weights: Weights) -> dict[str, str]:
    """Return the first name that each name's tensor has."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in weights.items()}


def replaced(weights: Weights, values: Weights) -> dict[str, Tensor]:
    """Return the weights with some of them replaced by values, which get their precision.

    Args:
        weights: All of them, by all of their names.
        values: Other values; one of the names that a tensor has is enough.
    """
    firsts = first_names(weights)
    made = {firsts[name]: value.to(weights[name].dtype).contiguous() for name, value in values.items()}
    return {name: made.get(first, weights[name]) for name, first in firsts.items()}
