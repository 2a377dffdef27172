"""What the loop makes of a step: measure every part, advance, call the loss, reduce, add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import Loss, LossOutput, State, Stats
from posttrain.contracts.reduction import Part
from posttrain_plugins.testing.suites import Nonconformance

__tracebackhide__ = True


@dataclass(frozen=True)
class Shown:
    """A part of a step.

    Args:
        batch: What the loss is called with.
        part: How reductions see it.
        measured: What its `measure` is called with; None for nothing.
    """

    batch: Any
    part: Part
    measured: Any


@dataclass(frozen=True)
class Taken:
    """What a step came to.

    Args:
        total: The loss, a scalar with gradient.
        outputs: What the loss returned for each part.
        stats: What it measured, over all parts.
        state: Its state in this step.
    """

    total: Tensor
    outputs: tuple[LossOutput, ...]
    stats: Stats
    state: State

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of every metric over the step; what is not finite is left out."""
        held: dict[str, list[Tensor]] = {}
        for output in self.outputs:
            for name, values in output.metrics.items():
                held.setdefault(name, []).append(values.detach().double().flatten())
        joined = {name: torch.cat(values) for name, values in held.items()}
        finite = {name: values[values.isfinite()] for name, values in joined.items()}
        return {name: float(values.mean()) for name, values in finite.items() if len(values)}


def take_step(plugin: Loss, config: Any, parts: Sequence[Shown], state: State | None = None) -> Taken:
    """Take one optimizer step over parts that share the denominators of the whole.

    Args:
        plugin: The loss.
        config: Its options.
        parts: The parts.
        state: What the step before left; the first step by default.
    """
    before = plugin.begin(config) if state is None else state
    stats = measured(plugin, config, parts, before)
    now = plugin.advance(before, stats, config)
    outputs = tuple(terms_of(plugin, plugin(each.batch, config, stats, now)) for each in parts)
    shares = [reduced(output, each.part) for output, each in zip(outputs, parts, strict=True)]
    return Taken(torch.stack(shares).sum(), outputs, stats, now)


def terms_of(plugin: Loss, output: Any) -> LossOutput:
    """Return what a loss returned; refuse what is something else."""
    if not isinstance(output, LossOutput):
        raise Nonconformance(
            f"{type(plugin).__name__} must return a LossOutput, and returned a {type(output).__name__}"
        )
    return output


def measured(plugin: Loss, config: Any, parts: Sequence[Shown], state: State) -> dict[str, Tensor]:
    """Return a loss's sums over some parts, in float64 and without gradient."""
    sums: dict[str, Tensor] = {}
    batches = [each.measured for each in parts if each.measured is not None]
    batches = batches or [each.batch for each in parts]
    with torch.no_grad():
        found: list[Mapping[str, Tensor]] = [plugin.measure(batch, config, state) for batch in batches]
    for each in found:
        for name, value in each.items():
            sums[name] = sums.get(name, torch.zeros(())) + value.detach().double()
    return sums


def reduced(output: LossOutput, part: Part) -> Tensor:
    """Return a part's share of the loss: its terms, weighted and reduced; 0 without terms."""
    shares = [each.weight * each.reduction.total(each.values, part) for each in output.terms]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
