"""Measures posttrain against TRL and keeps what it finds, one JSON line a measurement.

    python tests/benchmarks/speed/measure.py [--only NAME…] [--objectives NAME…] [--parts grid race memory …]
        [--settings NAME…] [--repeats N] [--warm N] [--results FILE] [--again PART…]

A measurement that is in the results already is not made again: a run that was cut off goes on where it was.
What posttrain takes part in is measured anew when its code is another; TRL's grid depends on TRL alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import interleave
import materials
from objectives import OBJECTIVES
from results import (
    CLOCKS,
    RESULTS,
    SETTLED,
    TIMED,
    WARM,
    Results,
    difference,
    needed,
    step_seconds,
    tried_seconds,
)
from scenarios import DEFAULT, ROW_COUNTS, SCENARIOS, VOCABULARIES, Scenario, trl_grid

POSTTRAIN = "posttrain"
TRL_SIDE, POSTTRAIN_SIDE, PROFILE_SIDE = "trl_side.py", "posttrain_side.py", "profile_side.py"
PARTS = ("grid", "race", "memory", "profile", "vocabulary", "rows")
TRIED, PASSES = 2, 2
"""Steps that a setting of the grid is judged by, and how often each is taken; the first pass warms up."""
FINALISTS = 2
"""Settings of the grid that take part in a race: two steps do not always tell the fastest."""
REFERENCES = 3
"""Times that the pass over the reference is repeated in a race."""


class Bench:
    """Makes measurements that are not there yet.

    Args:
        results: Where they are kept.
        again: Parts to measure even so.
        repeats: Steps of each side that count.
        settings: Names of the settings of TRL to try and to race; all of the grid unless given.
        warm: Steps that go before those.
    """

    def __init__(
        self,
        results: Results,
        again: Sequence[str],
        repeats: int,
        settings: Sequence[str] | None = None,
        warm: int = WARM,
    ) -> None:
        self.results, self.again, self.repeats, self.settings = results, set(again), repeats, settings
        self.warm = warm
        self.cache = results.path.parent / "materials"

    def grid(self, scenario: Scenario, objective: str) -> None:
        """Try every setting of TRL for a few steps."""
        for name, setting in trl_grid(objective, scenario.batch[objective]).items():
            key = ("grid", scenario.name, objective, name)
            wanted = self.settings is None or name in self.settings
            if not wanted or self._has(key, ours=False):
                continue
            with Jobs(self.cache, scenario, objective, TRIED) as jobs:
                measured = _alone(jobs.of("trl", TRL_SIDE, setting, epochs=PASSES))
            unordered = bool(setting.get("unordered"))
            seconds, processor = (
                tried_seconds(measured[clock], unordered, PASSES, TRIED) for clock in CLOCKS
            )
            self.results.keep(key, seconds=seconds, processor=processor, setting=setting)
            _say(f"{' / '.join(key)}: {seconds:.3f} s a step, {processor:.3f} of processors")

    def race(self, scenario: Scenario, objective: str) -> None:
        """Let posttrain and TRL's fastest settings and its default take turns."""
        key = ("race", scenario.name, objective)
        if self._has(key, ours=True):
            return
        settings = trl_grid(objective, scenario.batch[objective])
        racing = dict.fromkeys([*self._fastest(scenario, objective)[:FINALISTS], DEFAULT])
        epochs = 2 if any(settings[name].get("unordered") for name in racing) else 1
        with Jobs(self.cache, scenario, objective, self.repeats + self.warm) as jobs:
            sides = {POSTTRAIN: jobs.of("posttrain", POSTTRAIN_SIDE, {}, epochs, REFERENCES, gradient=True)}
            for number, name in enumerate(racing):
                sides[name] = jobs.of(f"trl-{number}", TRL_SIDE, settings[name], epochs, REFERENCES, True)
            measured = interleave.together(sides)
            kept = {name: job["gradient"] for name, (_, job) in sides.items()}
            gradients = {name: difference(kept[POSTTRAIN], kept[name]) for name in racing}
        steps, warm = self.repeats + self.warm, self.warm
        times = {name: step_seconds(measured[name]["seconds"], epochs, steps, warm) for name in sides}
        best = min(racing, key=lambda name: times[name])
        facts = {"gradients": gradients, "epochs": epochs, "steps": steps, "warm": warm}
        self.results.keep(key, sides=measured, seconds=times, best=best, **facts)
        ratio = times[best] / times[POSTTRAIN]
        _say(f"{' / '.join(key)}: {times[best]:.3f} s ({best}) / {times[POSTTRAIN]:.3f} s = {ratio:.2f}")

    def memory(self, scenario: Scenario, objective: str) -> None:
        """Read each side's high-water mark in a process that does nothing else."""
        race = self.results.found.get(("race", scenario.name, objective))
        if race is None:
            raise SystemExit(f"{scenario.name} {objective}: there was no race, so nobody knows TRL's best")
        settings = trl_grid(objective, scenario.batch[objective])
        for name in dict.fromkeys((POSTTRAIN, race["best"], DEFAULT)):
            key, ours = ("memory", scenario.name, objective, name), name == POSTTRAIN
            if self._has(key, ours):
                continue
            script = POSTTRAIN_SIDE if ours else TRL_SIDE
            with Jobs(self.cache, scenario, objective, TRIED + 1) as jobs:
                measured = _alone(jobs.of("side", script, {} if ours else settings[name]))
            self._keep_peak(key, measured)

    def profile(self, scenario: Scenario, objective: str) -> None:
        """Look at what posttrain's steps hold, and what they spend their time on."""
        key = ("profile", scenario.name, objective)
        if self._has(key, ours=True):
            return
        with Jobs(self.cache, scenario, objective, SETTLED + TIMED) as jobs:
            measured = _alone(jobs.of("side", PROFILE_SIDE, {}))
        self.results.keep(key, memory=measured["memory"], time=measured["time"])
        _say(f"{' / '.join(key)}: {measured['memory']['resident'] / 2**20:.0f} MiB at most")

    def vocabulary(self, size: int) -> None:
        """Read posttrain's high-water mark with a vocabulary of this size."""
        key = ("vocabulary", str(size))
        if self._has(key, ours=True):
            return
        base = SCENARIOS["short-answers"]
        scenario = replace(base, model=replace(base.model, vocabulary=size))
        with Jobs(self.cache, scenario, "sft", TRIED + 1) as jobs:
            measured = _alone(jobs.of("side", POSTTRAIN_SIDE, {}))
        self._keep_peak(key, measured, needed=needed(scenario.model))

    def rows(self) -> None:
        """Take the same number of steps through datasets of several sizes, in turns."""
        key = ("rows",)
        if self._has(key, ours=True):
            return
        scenario, steps = SCENARIOS["short-answers"], 20
        batch = scenario.batch["sft"]
        with Jobs(self.cache, scenario, "sft", max(ROW_COUNTS) // batch) as jobs:
            sides = {}
            for count in ROW_COUNTS:
                script, job = jobs.of(f"rows-{count}", POSTTRAIN_SIDE, {"max_steps": steps}, epochs=None)
                sides[str(count)] = script, job | {"count": count}
            measured = interleave.together(sides)
        self.results.keep(key, sides=measured, batch=batch, steps=steps)
        medians = {count: statistics.median(measured[count]["seconds"]["step"][1:]) for count in sides}
        _say("rows: " + ", ".join(f"{count} {seconds:.3f} s a step" for count, seconds in medians.items()))

    def _fastest(self, scenario: Scenario, objective: str) -> list[str]:
        """Name the settings of the grid that were tried, the fastest first."""
        grid = trl_grid(objective, scenario.batch[objective])
        names = [name for name in grid if self.settings is None or name in self.settings]
        found = {name: self.results.found.get(("grid", scenario.name, objective, name)) for name in names}
        tried = {name: record["seconds"] for name, record in found.items() if record is not None}
        if not tried:
            raise SystemExit(f"{scenario.name} {objective}: no setting of the grid was tried")
        return sorted(tried, key=tried.__getitem__)

    def _has(self, key: tuple[str, ...], ours: bool) -> bool:
        return key[0] not in self.again and self.results.has(key, ours)

    def _keep_peak(self, key: tuple[str, ...], measured: Mapping[str, Any], **facts: Any) -> None:
        peak = measured["peak"] - measured["imported"]
        self.results.keep(key, bytes=peak, imported=measured["imported"], **facts)
        _say(f"{' / '.join(key)}: {peak / 2**20:.0f} MiB")


class Jobs:
    """A scratch directory with the rows of a measurement, and the jobs of its sides.

    Args:
        cache: Where models are kept.
        scenario: The shape.
        objective: What is trained.
        steps: Optimizer steps of an epoch.
    """

    def __init__(self, cache: Path, scenario: Scenario, objective: str, steps: int) -> None:
        self.model = materials.start_directory(scenario.model, objective, cache)
        self.scenario, self.objective = scenario, objective
        self.count = steps * scenario.batch[objective]

    def __enter__(self) -> Jobs:
        self.scratch = Path(tempfile.mkdtemp(prefix="speed-"))
        self.rows = self.scratch / "rows.jsonl"
        drawn = materials.rows(self.scenario, self.objective, self.count)
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in drawn))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.scratch)

    def of(
        self,
        name: str,
        script: str,
        setting: Mapping[str, Any],
        epochs: int | None = 1,
        references: int = 1,
        gradient: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Return the script and the job of a side.

        Args:
            name: Of its directory.
            script: What runs it.
            setting: Options of its own.
            epochs: Passes over the rows; None: the setting says how many steps.
            references: Times that a pass over the reference is repeated, where there is one.
            gradient: Keep the first step's gradient.
        """
        job = {
            "directory": str(self.scratch / name),
            "model": str(self.model),
            "rows": str(self.rows),
            "count": self.count,
            "batch": self.scenario.batch[self.objective],
            "objective": self.objective,
            "lora": self.scenario.lora,
            "threads": interleave.THREADS,
            "setting": dict(setting),
            "references": references,
            "epochs": epochs,
            "gradient": str(self.scratch / f"{name}.safetensors") if gradient else None,
        }
        return script, job


def _alone(side: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    measured: dict[str, Any] = interleave.together({"side": side}, machine=False)["side"]
    return measured


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--settings", nargs="+", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm", type=int, default=WARM, help="steps before those that count")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(given)


def run(asked: argparse.Namespace) -> Results:
    """Measure what is asked for: of each scenario the whole grid before its race."""
    bench = Bench(Results(asked.results), asked.again, asked.repeats, asked.settings, asked.warm)
    for name in asked.only:
        for objective in filter(SCENARIOS[name].batch.__contains__, asked.objectives):
            for part in ("grid", "race", "memory", "profile"):
                if part in asked.parts:
                    getattr(bench, part)(SCENARIOS[name], objective)
    if "vocabulary" in asked.parts:
        for size in VOCABULARIES:
            bench.vocabulary(size)
    if "rows" in asked.parts:
        bench.rows()
    return bench.results


if __name__ == "__main__":
    run(arguments(sys.argv[1:]))
