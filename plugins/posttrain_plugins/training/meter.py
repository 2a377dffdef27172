"""Metrics from step to step: means since the last report, and over the last few steps for the final figures."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT = 10
"""Steps that the final figures are averaged over."""


@dataclass
class Meter:
    """Metrics of the steps since the last report, and of the last few steps; part of a checkpoint.

    Args:
        window: Metrics of each step since the last report.
        recent: Metrics of the last `RECENT` steps.
    """

    window: list[dict[str, float]] = field(default_factory=list)
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, metrics: dict[str, float], once: Mapping[str, float] | None = None) -> None:
        """Take in one step; what is `once` is reported but is none of the final figures."""
        self.window.append(metrics | dict(once or {}))
        self.recent.append(metrics)

    def report(self) -> dict[str, float]:
        """Return the means since the last report and start anew."""
        means, self.window = step_means(self.window), []
        return means

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"window": self.window, "recent": list(self.recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.window, self.recent = list(state["window"]), deque(state["recent"], maxlen=RECENT)


def step_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of several steps, each over the steps that have a finite value of it."""
    names = dict.fromkeys(name for step in steps for name in step)
    values = {
        name: [step[name] for step in steps if math.isfinite(step.get(name, math.nan))] for name in names
    }
    return {name: sum(found) / len(found) for name, found in values.items() if found}
