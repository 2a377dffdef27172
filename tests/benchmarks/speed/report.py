"""From measurements to the pages of `docs/evidence/`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from comparison import Found, Row, table
from flops import total
from interleave import PRODUCTS
from materials import rows
from measure import POSTTRAIN
from objectives import OBJECTIVES
from pages import PAGES, Page
from profiles import profile_lines
from scenarios import DEFAULT, ROW_COUNTS, SCENARIOS, VOCABULARIES, trl_grid

MIB = 2**20
SLACK = 1.2
"""Largest peak of memory wanted, as a multiple of what is needed."""
FLAT = 1.05
"""How much longer steps over a larger dataset may take and still count as the same."""


def lines_of(page: Page, found: Found) -> list[str]:
    """Return the lines of a page."""
    every = table(found, page)
    others = [row for row in every if not row.scenario.main]
    rest = "Other shapes, where the aim is not to be slower and not to take more memory:"
    return [
        *_method(page, every),
        f"Races were run at commit {_commits(page, found)}; the page was written at the one above.",
        "",
        *_disturbance(every, [row for each in PAGES for row in table(found, each)]),
        "## Steps",
        "",
        *_race_lines([row for row in every if row.scenario.main]),
        "",
        *([rest, "", *_race_lines(others), ""] if page.more or others else []),
        *_shortfalls(page, found, every),
        "",
        *_missing(page, found),
        *profile_lines(page, found),
        *_shape_lines(page),
        "",
        *([*_vocabulary_lines(found), "", *_count_lines(found), ""] if page.more else []),
        *_startup_lines(page, found),
    ]


def _method(page: Page, every: Sequence[Row]) -> list[str]:
    spans = [_span([row.rates[kind] / 1e9 for row in every]) for kind in PRODUCTS]
    counted, warm = (_span([row.counted[at] for row in every]) for at in (0, 1))
    return [
        "posttrain's trainers through the stage that a pipeline runs, against `trl==1.16.0`, both in float32 with two",
        "threads, the same weights, tokens, labels, rows of a step, learning rate and optimizer (fused AdamW). Each",
        "side is a process of its own; they take turns step by step, so that noise hits all alike. Times are medians",
        f"of {counted} steps after the first {warm}. Between the turns the machine multiplies two 2048×2048 matrices:",
        f"{spans[0]} GFLOP/s as torch does it by default, {spans[1]} by the fastest library here that stays exact",
        "(medians of the runs).",
        "TRL's default is the trainer as it comes, but in float32; its best is the fastest in the race, which the",
        f"fastest one or two of the settings that were tried (the [grid's page]({page.name}-grid.md); all stand in",
        "`tests/benchmarks/speed/scenarios.py`) run beside the default. Threads spin for a short while only",
        "(`GOMP_SPINCOUNT=1000`), on both sides; posttrain's side has the environment of a stage's process, which has",
        "glibc keep freed blocks besides.",
        "Gradient: largest difference of the gradients of the first step, relative to the largest element.",
        "Memory: high-water mark of a fresh process less its resident size after imports. Rate: share of the two",
        "measured rates of matrix products that is reached on necessary operations (`flops.py` says which are),",
        "prompts that several answers share counted once; the lower share counts. Commit: what was measured.",
        *page.about,
    ]


def _commits(page: Page, found: Found) -> str:
    """Name the commits that were measured, and how many races each."""
    races = [
        record["commit"]
        for key, record in sorted(found.items())
        if key[0] == "race" and key[2] in page.objectives
    ]
    return ", ".join(f"`{commit}` ({races.count(commit)})" for commit in dict.fromkeys(races))


QUIET = 1.5
"""How many times as fast as at its slowest a machine without other work multiplies, at most."""


def _disturbance(every: Sequence[Row], known: Sequence[Row]) -> list[str]:
    """Say which races shared the machine with other work, as its rate of products beside that of all others shows."""
    best = max((row.rates[PRODUCTS[0]] for row in known), default=0.0)
    shared = [
        f"{row.scenario.name} {OBJECTIVES[row.objective].title}"
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
    if not values:
        return "not measured"
    least, most = (f"{end(values):.0f}" for end in (min, max))
    return least if least == most else f"{least} to {most}"


def _race_lines(every: Iterable[Row]) -> list[str]:
    head = (
        "| shape | | posttrain | TRL's best | its setting | TRL's default | faster than best | wanted |"
        " than default | gradient | memory of TRL's best | wanted | rate | commit |"
    )
    return [head, "|" + "---|" * 14, *map(_race_line, every)]


def _race_line(row: Row) -> str:
    default = row.seconds[DEFAULT] / row.seconds[POSTTRAIN]
    memory = "–" if row.memory is None else f"{row.memory:.2f}"
    if row.memory is not None:
        memory += f" ({row.peaks[POSTTRAIN] / MIB:.0f} of {row.peaks[row.best] / MIB:.0f} MiB)"
    cells = [
        row.scenario.name,
        OBJECTIVES[row.objective].title,
        f"{row.seconds[POSTTRAIN]:.3f} s",
        f"{row.seconds[row.best]:.3f} s",
        row.best,
        f"{row.seconds[DEFAULT]:.3f} s",
        f"**{row.ratio:.2f}×**",
        f"≥ {row.scenario.ratio(row.objective):g}×",
        f"{default:.2f}×",
        f"{row.gradient:.1e}" + (f" ({row.compared})" if row.compared != row.best else ""),
        memory,
        f"≤ {row.scenario.share(row.objective):g}",
        ", ".join(f"{share:.0%}" for share in row.shares),
        f"`{row.commit[:7]}`",
    ]
    return f"| {' | '.join(cells)} |"


def _shortfalls(page: Page, found: Found, every: Sequence[Row]) -> list[str]:
    others = [*_heavy(found), *_slowed(found)] if page.more else []
    lines = [
        f"- {row.scenario.name}, {OBJECTIVES[row.objective].title}: {'; '.join(row.shortfalls)}."
        for row in every
        if row.shortfalls
    ]
    lines += [f"- {each}." for each in others]
    if not lines:
        return ["Everything that was wanted of these is so." if every else "No race was run."]
    floor = (
        "Weights, gradients and Adam's two moments of the 17.3M shapes are 264 MiB on either side, so a share of memory"
        " cannot be smaller than 264 MiB of TRL's. TRL's fastest setting often takes one row at a time and so little"
        " memory; its default takes several times as much."
    )
    explained = (
        "The [profiles](#profiles) say where memory and time go." if profile_lines(page, found) else ""
    )
    return ["**Falls short:**", "", *lines, "", f"{floor} {explained}".rstrip()]


def _missing(page: Page, found: Found) -> list[str]:
    """Say which of the main shapes were not raced over."""
    missing = [
        f"{name} {OBJECTIVES[objective].title}"
        for name, scenario in SCENARIOS.items()
        for objective in page.objectives
        if scenario.main and ("race", name, objective) not in found
    ]
    return [f"Not measured: {', '.join(missing)}.", ""] if missing else []


def _shape_lines(page: Page) -> list[str]:
    titles = ", ".join(OBJECTIVES[each].title for each in page.objectives)
    lines = [
        f"| shape | parameters | vocabulary | trained | prompt, answer (median tokens) | batch {titles} |",
        "|" + "---|" * 6,
    ]
    for scenario in SCENARIOS.values():
        batches = [str(scenario.batch[each]) for each in page.objectives if each in scenario.batch]
        cells = [
            scenario.name,
            f"{scenario.model.parameters / 1e6:.1f}M",
            f"{scenario.model.vocabulary:,}",
            "adapters" if scenario.lora else "all",
            f"{scenario.prompt.median}, {scenario.answer.median}",
            ", ".join(batches),
        ]
        if batches:
            lines.append(f"| {' | '.join(cells)} |")
    return ["## Shapes", "", *lines]


def _heavy(found: Found) -> Iterator[str]:
    """Say with which vocabularies a step takes more memory than wanted."""
    for size in VOCABULARIES:
        record = found.get(("vocabulary", str(size)))
        if record is not None and (of := _of_needed(record)) > SLACK:
            yield f"vocabulary of {size:,}: {of:.2f} of the memory that is needed, at most {SLACK:g} wanted"


def _slowed(found: Found) -> Iterator[str]:
    """Say with how many rows steps are slower than with the fewest."""
    record = found.get(("rows",))
    if record is None:
        return
    steps = {count: _later_step(record, count) for count in ROW_COUNTS}
    first = steps[ROW_COUNTS[0]]
    for count, seconds in steps.items():
        if seconds > FLAT * first:
            slower = f"{seconds / first:.2f} of those with {ROW_COUNTS[0]:,} rows"
            yield f"{count:,} rows: steps take {slower}, the same wanted"


def _of_needed(record: Mapping[str, Any]) -> float:
    of: float = record["bytes"] / record["needed"]
    return of


def _later_step(record: Mapping[str, Any], count: int) -> float:
    """Return the seconds of a step after the first over a dataset of so many rows."""
    return float(statistics.median(record["sides"][str(count)]["seconds"]["step"][1:]))


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
            of = _of_needed(record)
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
        side, step = record["sides"][str(count)], _later_step(record, count)
        each = _tokens(record["batch"] * record["steps"]) / record["steps"]
        lines.append(f"| {count:,} | {step:.3f} | {each / step:,.0f} | {side['setup']:.1f} s |")
    return lines


def _tokens(count: int) -> int:
    return total(rows(SCENARIOS["short-answers"], "sft", count), OBJECTIVES["sft"].learned).tokens


def _startup_lines(page: Page, found: Found) -> list[str]:
    lines = [
        "## Start-up",
        "",
        "Seconds from the end of the imports to the first step, in the races above: opening the model, preparing the",
        "rows, for posttrain also its checks and choices. Not in the times of steps. (For TRL the rows are tokens",
        "already.) A reference that is scored first is included, as often as the race repeats it.",
        "",
        "| shape | | posttrain | TRL's best |",
        "|---|---|---|---|",
    ]
    for row in table(found, page):
        sides = found["race", row.scenario.name, row.objective]["sides"]
        times = (f"{sides[side]['setup']:.1f} s" for side in (POSTTRAIN, row.best))
        lines.append(f"| {row.scenario.name} | {OBJECTIVES[row.objective].title} | {' | '.join(times)} |")
    return lines


def grid_lines(page: Page, found: Found) -> list[str]:
    """Return the lines of the page about TRL's settings for the objectives of a page."""
    lines = [
        "Seconds of a step, over two steps after a pass over the same two that warms up; with the share of a pass over",
        "the reference where it is scored first. The fastest is in bold.",
        "`8x1`: per_device_train_batch_size 8, gradient_accumulation_steps 1.",
    ]
    for name, scenario in SCENARIOS.items():
        for objective in filter(scenario.batch.__contains__, page.objectives):
            settings = trl_grid(objective, scenario.batch[objective])
            tried = {each: found.get(("grid", name, objective, each)) for each in settings}
            times = {each: record["seconds"] for each, record in tried.items() if record is not None}
            if times:
                lines += [
                    "",
                    f"## {name}, {OBJECTIVES[objective].title}",
                    "",
                    "| setting | seconds |",
                    "|---|---|",
                ]
                lines += [_grid_line(each, times) for each in times]
    return lines


def _grid_line(name: str, times: Mapping[str, float]) -> str:
    mark = "**" if times[name] == min(times.values()) else ""
    return f"| {mark}{name}{mark} | {mark}{times[name]:.3f}{mark} |"


def grid_figures(page: Page, found: Found) -> dict[str, float]:
    """Return the seconds of each setting of TRL that was tried for the objectives of a page."""
    tried = {key: record for key, record in found.items() if key[0] == "grid" and key[2] in page.objectives}
    return {" / ".join(key): record["seconds"] for key, record in tried.items()}


def figures(page: Page, found: Found) -> dict[str, Any]:
    """Return what machines may want to read."""
    return {
        f"{row.scenario.name}, {row.objective}": {
            "seconds": row.seconds,
            "ratio": row.ratio,
            "best": row.best,
            "gradient": row.gradient,
            "compared": row.compared,
            "gradients": found["race", row.scenario.name, row.objective]["gradients"],
            "peaks": row.peaks,
            "shares": row.shares,
            "rates": row.rates,
            "shortfalls": row.shortfalls,
            "sides": found["race", row.scenario.name, row.objective]["sides"],
        }
        for row in table(found, page)
    }
