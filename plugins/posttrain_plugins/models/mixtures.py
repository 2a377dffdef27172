"""One tensor of several: means, arcs, and sums of differences. All in the precision of what is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PARALLEL = 1e-4
"""Below this sine of the angle between two tensors the arc is a line."""


@dataclass(frozen=True)
class Recipe:
    """How tensors are put together.

    Args:
        method: A key of `METHODS`.
        weights: How much each counts; they sum to 1.
        density: Share of a difference that is kept.
        scale: What joined differences are multiplied by.
        seed: Which differences are kept by chance.
    """

    method: str
    weights: tuple[float, ...]
    density: float = 1.0
    scale: float = 1.0
    seed: int = 0

    def mix(self, tensors: Sequence[Tensor], base: Tensor | None, number: int) -> Tensor:
        """Return one tensor of several of the same shape.

        Args:
            tensors: One of each model.
            base: That of the model they come from, for methods on differences.
            number: The tensor's place in its model, so that chance differs from tensor to tensor.
        """
        if base is None:
            return METHODS[self.method](self, tensors)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + number)
            joined = METHODS[self.method](self, [tensor - base for tensor in tensors])
        return base + self.scale * joined


def equal_or(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """Return weights that sum to 1; equal ones where none are given."""
    given = list(weights) or [1.0] * count
    return tuple(weight / sum(given) for weight in given)


def linear(recipe: Recipe, tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ wᵢ xᵢ (Wortsman et al. 2022, https://arxiv.org/abs/2203.05482)."""
    total = torch.zeros_like(tensors[0])
    for weight, tensor in zip(recipe.weights, tensors, strict=True):
        total.add_(tensor, alpha=weight)
    return total


def slerp(recipe: Recipe, tensors: Sequence[Tensor]) -> Tensor:
    """Return sin((1−t)Ω)/sin Ω · a + sin(tΩ)/sin Ω · b, Ω the angle between a and b (Shoemake 1985).

    t is the second weight. Tensors that point the same way, or the opposite one, are averaged instead.
    """
    one, other = tensors
    norms = one.norm() * other.norm()
    cosine = ((one * other).sum() / norms).clamp(-1, 1) if norms > 0 else one.new_ones(())
    angle = cosine.acos()
    if float(angle.sin()) < _PARALLEL:
        return linear(recipe, tensors)
    t = recipe.weights[1]
    return ((1 - t) * angle).sin() / angle.sin() * one + (t * angle).sin() / angle.sin() * other


def ties(recipe: Recipe, differences: Sequence[Tensor]) -> Tensor:
    """Trim each difference to its largest entries, elect a sign for each entry, and average what agrees with it.

    Yadav et al. 2023 (https://arxiv.org/abs/2306.01708), tensor by tensor. With equal weights it is the paper's; other
    weights multiply the differences, relative to equal ones, after the signs are elected.
    """
    from peft.utils.merge_utils import ties as joined

    weights = differences[0].new_tensor(recipe.weights) * len(differences)
    result: Tensor = joined(list(differences), weights, recipe.density)
    return result


def dare(recipe: Recipe, differences: Sequence[Tensor]) -> Tensor:
    """Return Σ wᵢ mᵢ δᵢ / density, where each entry of a mask m is 1 with that probability.

    Yu et al. 2023 (https://arxiv.org/abs/2311.03099).
    """
    from peft.utils.merge_utils import dare_linear

    weights = differences[0].new_tensor(recipe.weights)
    result: Tensor = dare_linear(list(differences), weights, recipe.density)
    return result


METHODS: Mapping[str, Callable[[Recipe, Sequence[Tensor]], Tensor]] = {
    "linear": linear,
    "slerp": slerp,
    "ties": ties,
    "dare": dare,
}
