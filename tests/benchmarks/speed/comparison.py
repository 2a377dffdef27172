"""What a race came to beside what was wanted of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flops import necessary
from interleave import MACHINE, PRODUCTS
from materials import paired, rows
from measure import POSTTRAIN
from objectives import OBJECTIVES
from pages import Page
from results import WARM
from scenarios import DEFAULT, SCENARIOS, Scenario, trl_grid

Found = Mapping[tuple[str, ...], dict[str, Any]]
ENOUGH = 0.5
"""Least share of the machine's matrix products that is wanted of the first three shapes."""
RATED = ("sft", "dpo")
"""Objectives of which it is wanted."""
EQUAL = 2e-5
"""Gradients that differ by more, relative to the largest element, are not of the same loss."""


@dataclass(frozen=True)
class Row:
    """One scenario and objective, as the table shows it.

    Args:
        scenario: The shape.
        objective: What was trained.
        seconds: Of a step by side (posttrain or a setting of TRL), its share of the reference included.
        best: Name of TRL's fastest setting.
        gradient: Largest difference of the first step's gradients, to that of `compared`.
        compared: The setting of TRL that computes the same loss: its fastest, or its default where that is cut into
            micro-batches of which TRL averages each by its own tokens.
        peaks: Bytes by side; empty where they were not measured.
        achieved: Necessary operations a second.
        rates: Operations a second of the machine's products, by kind, measured in the same run.
        counted: How many steps count, and how many went before them.
        commit: What was measured.
    """

    scenario: Scenario
    objective: str
    seconds: Mapping[str, float]
    best: str
    gradient: float
    compared: str
    peaks: Mapping[str, int]
    achieved: float
    rates: Mapping[str, float]
    counted: tuple[int, int]
    commit: str

    @property
    def ratio(self) -> float:
        """How many times faster than TRL's best."""
        return self.seconds[self.best] / self.seconds[POSTTRAIN]

    @property
    def shares(self) -> list[float]:
        """Parts of the machine's measured rates, by kind of product."""
        return [self.achieved / self.rates[kind] for kind in PRODUCTS]

    @property
    def memory(self) -> float | None:
        """Peak of memory as a share of that of TRL's best."""
        known = {POSTTRAIN, self.best} <= set(self.peaks)
        return self.peaks[POSTTRAIN] / self.peaks[self.best] if known else None

    @property
    def shortfalls(self) -> list[str]:
        """What was wanted and is not so."""
        target, share, found = self.scenario.ratio(self.objective), self.scenario.share(self.objective), []
        if self.ratio < target:
            found.append(f"{self.ratio:.2f}× of at least {target:g}×")
        if self.memory is not None and self.memory > share:
            found.append(f"{self.memory:.2f} of TRL's memory, at most {share:g} wanted")
        rated = self.objective in RATED and self.scenario.main and self.scenario.model.vocabulary > 1000
        if rated and min(self.shares) < ENOUGH:
            told = " and ".join(f"{share:.0%}" for share in self.shares)
            found.append(f"{told} of the matrix-product rates, at least {ENOUGH:.0%} wanted")
        if self.gradient > EQUAL:
            found.append(f"gradients differ by {self.gradient:.1e}")
        return found


def table(found: Found, page: Page) -> list[Row]:
    """Return a row for every race of a page that was run."""
    keys = ((name, objective) for name in SCENARIOS for objective in page.objectives)
    return [_row(found, *key) for key in keys if ("race", *key) in found]


def _row(found: Found, name: str, objective: str) -> Row:
    race, scenario = found["race", name, objective], SCENARIOS[name]
    best, steps, machine = race["best"], race["steps"], race["sides"][MACHINE]
    peaks = {
        side: found["memory", name, objective, side]["bytes"]
        for side in (POSTTRAIN, best, DEFAULT)
        if ("memory", name, objective, side) in found
    }
    rates = {kind: machine["operations"] / statistics.median(machine["seconds"][kind]) for kind in PRODUCTS}
    achieved = _operations(scenario, objective, steps) / steps / race["seconds"][POSTTRAIN]
    setting = trl_grid(objective, scenario.batch[objective])[best]
    other = OBJECTIVES[objective].by_tokens and setting["gradient_accumulation_steps"] > 1
    compared = DEFAULT if other else best
    gradient = race["gradients"][compared]
    warm = race.get("warm", WARM)
    counted = steps - warm, warm
    return Row(
        scenario,
        objective,
        race["seconds"],
        best,
        gradient,
        compared,
        peaks,
        achieved,
        rates,
        counted,
        race["commit"],
    )


def _operations(scenario: Scenario, objective: str, steps: int) -> float:
    drawn = rows(scenario, objective, steps * scenario.batch[objective])
    return necessary(scenario.model, paired(drawn, objective), OBJECTIVES[objective], scenario.lora)
