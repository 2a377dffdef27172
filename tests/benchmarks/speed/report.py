"""From measurements to the pages of `docs/evidence/`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flops import Work, necessary, total
from interleave import MACHINE, PRODUCTS
from materials import rows
from measure import POSTTRAIN
from scenarios import DEFAULT, OBJECTIVES, ROW_COUNTS, SCENARIOS, VOCABULARIES, Scenario, trl_grid

Found = Mapping[tuple[str, ...], dict[str, Any]]
MIB = 2**20
ENOUGH = 0.5
"""Least share of the machine's matrix products that is wanted of the first three shapes."""
SLACK = 1.2
"""Largest peak of memory wanted, as a multiple of what is needed."""
EQUAL = 1e-4
"""Gradients that differ by more, relative to the largest element, are not of the same loss."""


@dataclass(frozen=True)
class Row:
    """One scenario and objective, as the table shows it.

    Args:
        scenario: The shape.
        objective: `sft` or `dpo`.
        seconds: Of a step by side (posttrain or a setting of TRL), its share of the reference included.
        best: Name of TRL's fastest setting.
        gradient: Largest difference of the first step's gradients.
        peaks: Bytes by side; empty where they were not measured.
        achieved: Necessary operations a second.
        rates: Operations a second of the machine's products, by kind, measured in the same run.
    """

    scenario: Scenario
    objective: str
    seconds: Mapping[str, float]
    best: str
    gradient: float
    peaks: Mapping[str, int]
    achieved: float
    rates: Mapping[str, float]

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
        target, found = self.scenario.targets[self.objective], []
        if self.ratio < target:
            found.append(f"{self.ratio:.2f}× of at least {target:g}×")
        if self.memory is not None and self.memory > self.scenario.memory:
            found.append(f"{self.memory:.2f} of TRL's memory, at most {self.scenario.memory:g} wanted")
        if self.scenario.main and self.scenario.model.vocabulary > 1000 and self.shares[0] < ENOUGH:
            found.append(f"{self.shares[0]:.0%} of the matrix-product rate, at least {ENOUGH:.0%} wanted")
        if self.gradient > EQUAL:
            found.append(f"gradients differ by {self.gradient:.1e}")
        return found


def table(found: Found) -> list[Row]:
    """Return a row for every race that was run."""
    keys = ((name, objective) for name in SCENARIOS for objective in OBJECTIVES)
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
    return Row(scenario, objective, race["seconds"], best, race["gradients"][best], peaks, achieved, rates)


def _operations(scenario: Scenario, objective: str, steps: int) -> float:
    drawn = rows(scenario, objective, steps * scenario.batch[objective])
    return necessary(scenario.model, total(drawn, objective), objective, scenario.lora)


def page(found: Found) -> list[str]:
    """Return the lines of the page."""
    every = table(found)
    return [
        *_method(every),
        "",
        *_disturbance(every),
        "## Steps",
        "",
        *_race_lines([row for row in every if row.scenario.main]),
        "",
        "Other shapes, where the aim is not to be slower and not to take more memory:",
        "",
        *_race_lines([row for row in every if not row.scenario.main]),
        "",
        *_shortfalls(every),
        "",
        *_shape_lines(),
        "",
        *_vocabulary_lines(found),
        "",
        *_count_lines(found),
        "",
        *_startup_lines(found),
    ]


def _method(every: Sequence[Row]) -> list[str]:
    spans = [_span([row.rates[kind] / 1e9 for row in every]) for kind in PRODUCTS]
    return [
        "posttrain's trainers through the stage that a pipeline runs, against `trl==1.16.0`, both in float32 with two",
        "threads, the same weights, tokens, labels, rows of a step, learning rate and optimizer (fused AdamW). Each",
        "side is a process of its own; they take turns step by step, so that noise hits all alike. Times are medians",
        "of the steps after the first eight. Between the turns the machine multiplies two 2048×2048 matrices:",
        f"{spans[0]} GFLOP/s as torch does it by default, {spans[1]} by the fastest library here that stays exact",
        "(medians of the runs). DPO times include the step's share of the passes over the reference for one epoch.",
        "TRL's default is the trainer as it comes, but in float32; its best is the fastest setting of the grid in",
        "`tests/benchmarks/speed/scenarios.py`: the two that were fastest there (the [grid's page](speed-grid.md))",
        "both race. Threads spin for a short while only (`GOMP_SPINCOUNT=1000`), on both sides; posttrain's side has",
        "the environment of a stage's process, which asks glibc for huge pages besides.",
        "Gradient: largest difference of the gradients of the first step, relative to the largest element.",
        "Memory: high-water mark of a fresh process less its resident size after imports. Rate: share of the two",
        "measured rates of matrix products that is reached on necessary operations (`flops.py` says which are),",
        "prompts that the two sides of a pair share counted once.",
    ]


QUIET = 1.5
"""How many times as fast as at its slowest a machine without other work multiplies, at most."""


def _disturbance(every: Sequence[Row]) -> list[str]:
    """Say which races shared the machine with other work, as its own rate of products shows."""
    best = max((row.rates[PRODUCTS[0]] for row in every), default=0.0)
    shared = [
        f"{row.scenario.name} {row.objective.upper()}"
        for row in every
        if QUIET * row.rates[PRODUCTS[0]] < best
    ]
    if not shared:
        return []
    return [
        f"The machine had other work beside these races, and multiplied at less than 1/{QUIET:g} of its best rate:"
        f" {', '.join(shared)}. Sides took turns all the same, so ratios mean more there than seconds.",
        "",
    ]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "not measured"


def _race_lines(every: Iterable[Row]) -> list[str]:
    head = (
        "| shape | | posttrain | TRL's best | its setting | TRL's default | faster than best | wanted |"
        " than default | gradient | memory of TRL's best | wanted | rate |"
    )
    return [head, "|" + "---|" * 13, *map(_race_line, every)]


def _race_line(row: Row) -> str:
    default = row.seconds[DEFAULT] / row.seconds[POSTTRAIN]
    memory = "–" if row.memory is None else f"{row.memory:.2f}"
    if row.memory is not None:
        memory += f" ({row.peaks[POSTTRAIN] / MIB:.0f} of {row.peaks[row.best] / MIB:.0f} MiB)"
    cells = [
        row.scenario.name,
        row.objective.upper(),
        f"{row.seconds[POSTTRAIN]:.3f} s",
        f"{row.seconds[row.best]:.3f} s",
        row.best,
        f"{row.seconds[DEFAULT]:.3f} s",
        f"**{row.ratio:.2f}×**",
        f"≥ {row.scenario.targets[row.objective]:g}×",
        f"{default:.2f}×",
        f"{row.gradient:.1e}",
        memory,
        f"≤ {row.scenario.memory:g}",
        ", ".join(f"{share:.0%}" for share in row.shares),
    ]
    return f"| {' | '.join(cells)} |"


def _shortfalls(every: Sequence[Row]) -> list[str]:
    short = [row for row in every if row.shortfalls]
    if not short:
        return ["Everything that was wanted of these is so." if every else "No race was run."]
    lines = [f"- {row.scenario.name}, {row.objective.upper()}: {'; '.join(row.shortfalls)}." for row in short]
    return ["**Falls short:**", "", *lines]


def _shape_lines() -> list[str]:
    lines = [
        "| shape | parameters | vocabulary | trained | prompt, answer (median tokens) | batch SFT, DPO |"
    ]
    lines.append("|" + "---|" * 6)
    for scenario in SCENARIOS.values():
        cells = [
            scenario.name,
            f"{scenario.model.parameters / 1e6:.1f}M",
            f"{scenario.model.vocabulary:,}",
            "adapters" if scenario.lora else "all",
            f"{scenario.prompt.median}, {scenario.answer.median}",
            f"{scenario.batch['sft']}, {scenario.batch['dpo']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return ["## Shapes", "", *lines]


def _vocabulary_lines(found: Found) -> list[str]:
    lines = [
        "## Memory and the vocabulary",
        "",
        "Needed: weights, gradients, both moments of the optimizer and two more buffers of the head's size; at most",
        f"{SLACK - 1:.0%} more is wanted. Short answers, SFT, batch 8.",
        "",
        "| vocabulary | needed | peak | of needed |",
        "|---|---|---|---|",
    ]
    for size in VOCABULARIES:
        record = found.get(("vocabulary", str(size)))
        if record is not None:
            of = record["bytes"] / record["needed"]
            word = "" if of <= SLACK else ", **too much**"
            lines.append(
                f"| {size:,} | {record['needed'] / MIB:.0f} MiB | {record['bytes'] / MIB:.0f} MiB | {of:.2f}{word} |"
            )
    return lines


def _count_lines(found: Found) -> list[str]:
    record = found.get(("rows",))
    lines = ["## Size of the dataset", ""]
    if record is None:
        return [*lines, "Not measured."]
    lines += [
        f"{record['steps'] - 1} steps after the first over each, short answers, in turns.",
        "",
        "| rows | seconds a step | tokens a second | start-up |",
        "|---|---|---|---|",
    ]
    for count in ROW_COUNTS:
        side = record["sides"][str(count)]
        step = statistics.median(side["seconds"]["step"][1:])
        each = _tokens(record["batch"] * record["steps"]).tokens / record["steps"]
        lines.append(f"| {count:,} | {step:.3f} | {each / step:,.0f} | {side['setup']:.1f} s |")
    return lines


def _tokens(count: int) -> Work:
    return total(rows(SCENARIOS["short-answers"], "sft", count), "sft")


def _startup_lines(found: Found) -> list[str]:
    lines = [
        "## Start-up",
        "",
        "Seconds from the end of the imports to the first step, in the races above: opening the model, preparing the",
        "rows, for posttrain also its checks and choices. Not in the times of steps. (For TRL the rows are tokens",
        "already.) DPO with a reference that is scored first includes that, as often as the race repeats it.",
        "",
        "| shape | | posttrain | TRL's best |",
        "|---|---|---|---|",
    ]
    for row in table(found):
        sides = found["race", row.scenario.name, row.objective]["sides"]
        times = (f"{sides[side]['setup']:.1f} s" for side in (POSTTRAIN, row.best))
        lines.append(f"| {row.scenario.name} | {row.objective.upper()} | {' | '.join(times)} |")
    return lines


def grid_page(found: Found) -> list[str]:
    """Return the lines of the page about TRL's settings."""
    lines = [
        "Seconds of a step, over two steps after a pass over the same two that warms up; with the share of a pass over",
        "the reference where it is scored first. The fastest is in bold; it and the next one take",
        "part in the race. `8x1`: per_device_train_batch_size 8, gradient_accumulation_steps 1.",
    ]
    for name, scenario in SCENARIOS.items():
        for objective in OBJECTIVES:
            settings = trl_grid(objective, scenario.batch[objective])
            tried = {each: found.get(("grid", name, objective, each)) for each in settings}
            times = {each: record["seconds"] for each, record in tried.items() if record is not None}
            if times:
                lines += ["", f"## {name}, {objective.upper()}", "", "| setting | seconds |", "|---|---|"]
                lines += [_grid_line(each, times) for each in times]
    return lines


def _grid_line(name: str, times: Mapping[str, float]) -> str:
    mark = "**" if times[name] == min(times.values()) else ""
    return f"| {mark}{name}{mark} | {mark}{times[name]:.3f}{mark} |"


def figures(found: Found) -> dict[str, Any]:
    """Return what machines may want to read."""
    return {
        f"{row.scenario.name}, {row.objective}": {
            "seconds": row.seconds,
            "ratio": row.ratio,
            "best": row.best,
            "gradient": row.gradient,
            "peaks": row.peaks,
            "shares": row.shares,
            "rates": row.rates,
            "shortfalls": row.shortfalls,
            "sides": found["race", row.scenario.name, row.objective]["sides"],
        }
        for row in table(found)
    }
