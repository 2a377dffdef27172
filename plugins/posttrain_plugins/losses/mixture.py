"""Several losses as one: a weighted sum in which each part keeps what it measures and remembers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.contracts.component import Component, NoOptions
from posttrain.contracts.loss import REFERENCES, Loss, LossOutput, Need, Scope, State, Stats

if TYPE_CHECKING:
    from torch import Tensor


class Mixture(Loss):
    """L = Σ weight · L_part over losses of one family.

    Its needs are those of all parts, and its scope is the widest one. Stats and state of a part stand under the part's
    name, followed by a number where several have it. So do metrics, except those of the first part to report a name.

    Args:
        parts: The losses and their options.
        weights: A positive weight for each.
    """

    def __init__(self, parts: Sequence[Component], weights: Sequence[float]) -> None:
        self.parts: Mapping[str, Component] = dict(zip(_labels(parts), parts, strict=True))
        self.weights = tuple(weights)
        self.metrics = _told(self.parts)
        self.family = parts[0].plugin.family
        self.scope = (
            Scope.STEP if any(each.plugin.scope is Scope.STEP for each in parts) else Scope.MICRO_BATCH
        )
        self.needs = frozenset[Need]().union(*(each.plugin.needs_of(each.config) for each in parts))
        self.needs_reference = bool(self.needs & REFERENCES)

    @property
    def measures(self) -> bool:
        """Whether a part measures."""
        return any(each.plugin.measures for each in self.parts.values())

    def begin(self, config: NoOptions) -> State:
        """Return the first state of every part."""
        return {label: each.plugin.begin(each.config) for label, each in self.parts.items()}

    def measure(self, batch: Any, config: NoOptions, state: State) -> Mapping[str, Tensor]:
        """Return what every part measures."""
        return {
            f"{label}/{name}": value
            for label, each in self.parts.items()
            for name, value in each.plugin.measure(batch, each.config, state[label]).items()
        }

    def advance(self, state: State, stats: Stats, config: NoOptions) -> State:
        """Return the next state of every part."""
        return {
            label: each.plugin.advance(state[label], _own(stats, label), each.config)
            for label, each in self.parts.items()
        }

    def __call__(self, batch: Any, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        """Return the terms of all parts."""
        terms, metrics = [], dict[str, "Tensor"]()
        for (label, each), weight in zip(self.parts.items(), self.weights, strict=True):
            output = each.plugin(batch, each.config, _own(stats, label), state[label])
            terms += [replace(term, weight=term.weight * weight) for term in output.terms]
            for name, values in output.metrics.items():
                metrics[f"{label}/{name}" if name in metrics else name] = values
        return LossOutput(terms, metrics)


def _told(parts: Mapping[str, Component]) -> frozenset[str] | None:
    """Return the names of all metrics; None where a part does not say its own."""
    told: set[str] = set()
    for label, each in parts.items():
        if each.plugin.metrics is None:
            return None
        told |= {f"{label}/{name}" if name in told else name for name in each.plugin.metrics}
    return frozenset(told)


def _labels(parts: Sequence[Component]) -> list[str]:
    """Return the names of parts, numbered from the second of a name on."""
    seen: Counter[str] = Counter()
    labels = []
    for each in parts:
        seen[each.name] += 1
        labels.append(each.name if seen[each.name] == 1 else f"{each.name}:{seen[each.name]}")
    return labels


def _own(stats: Stats, label: str) -> Stats:
    prefix = f"{label}/"
    return {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)}
