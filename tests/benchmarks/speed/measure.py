"""Measures posttrain against TRL and keeps what it finds, one JSON line a measurement.

    python tests/benchmarks/speed/measure.py [--only NAME…] [--objectives sft dpo] [--parts grid race memory …]
        [--repeats N] [--results FILE] [--again PART…]

A measurement that is in the results already is not made again: a run that was cut off goes on where it was.
TRL's grid depends on TRL alone; what posttrain takes part in is measured anew when the commit is another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import interleave
import materials
from scenarios import (
    DEFAULT,
    OBJECTIVES,
    ROW_COUNTS,
    SCENARIOS,
    VOCABULARIES,
    Scenario,
    Shape,
    trl_grid,
)

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "build" / "speed" / "results.jsonl"
POSTTRAIN, TRL, TRL_DEFAULT = "posttrain", "TRL's best", "TRL's default"
CLOCKS = ("seconds", "processor")
PARTS = ("grid", "race", "memory", "vocabulary", "rows")
TRIED, PASSES = 2, 2
"""Steps that a setting of the grid is judged by, and how often each is taken; the first pass warms up."""
REFERENCES = 3
"""Times that the pass over the reference is repeated in a race."""

Key = tuple[str, ...]


class Bench:
    """Makes measurements that are not there yet.

    Args:
        results: The file they are kept in.
        again: Parts to measure even so.
        repeats: Steps after the first, of each side.
    """

    def __init__(self, results: Path, again: list[str], repeats: int) -> None:
        self.results, self.again, self.repeats = results, set(again), repeats
        self.cache = results.parent / "materials"
        self.commit = _commit()
        self.found: dict[Key, dict[str, Any]] = {_key(record): record for record in read(results)}

    def grid(self, scenario: Scenario, objective: str) -> None:
        """Try every setting of TRL for a few steps."""
        for name, setting in trl_grid(objective, scenario.batch[objective]).items():
            if self._has("grid", scenario.name, objective, name):
                continue
            with self._job(scenario, objective, TRIED) as (job, _):
                side = job("trl", setting, references=1, epochs=PASSES)
                measured = interleave.together({"trl": side}, machine=False)["trl"]
            seconds, processor = (
                tried_seconds(measured[clock], bool(setting.get("unordered"))) for clock in CLOCKS
            )
            self._keep(
                "grid", scenario.name, objective, name, seconds=seconds, processor=processor, setting=setting
            )
            _say(
                f"grid {scenario.name} {objective} {name}: {seconds:.3f} s a step, {processor:.3f} of processors"
            )

    def race(self, scenario: Scenario, objective: str) -> None:
        """Let posttrain and TRL take turns."""
        if self._has("race", scenario.name, objective):
            return
        best = self.best(scenario, objective)
        settings = {TRL: best, TRL_DEFAULT: self.setting(scenario, objective, DEFAULT)}
        epochs = max(map(_epochs, settings.values()))
        with self._job(scenario, objective, self.repeats + 1) as (job, rows):
            sides = {
                name: job(f"trl-{number}", setting, references=REFERENCES, epochs=epochs, gradient=True)
                for number, (name, setting) in enumerate(settings.items())
            }
            sides = {POSTTRAIN: job("posttrain", {}, REFERENCES, epochs, True, "posttrain_side.py"), **sides}
            measured = interleave.together(sides)
            gradients = {name: sides[name][1]["gradient"] for name in sides}
            differences = {
                name: difference(gradients[POSTTRAIN], gradients[name]) for name in (TRL, TRL_DEFAULT)
            }
        steps = rows // scenario.batch[objective]
        self._keep(
            "race", scenario.name, objective, sides=measured, settings=settings, steps=steps,
            best=self.best_name(scenario, objective), gradients=differences,
        )  # fmt: skip
        ours = step_seconds(measured[POSTTRAIN]["seconds"], best, steps)
        theirs = step_seconds(measured[TRL]["seconds"], best, steps)
        _say(f"race {scenario.name} {objective}: {theirs:.3f} / {ours:.3f} = {theirs / ours:.2f}, "
             f"gradients differ by {differences[TRL]:.1e}")  # fmt: skip

    def memory(self, scenario: Scenario, objective: str) -> None:
        """Read each side's high-water mark in a process that does nothing else."""
        settings = {
            TRL: self.best(scenario, objective),
            TRL_DEFAULT: self.setting(scenario, objective, DEFAULT),
        }
        for name, setting in {POSTTRAIN: {}, **settings}.items():
            if self._has("memory", scenario.name, objective, name):
                continue
            script = "posttrain_side.py" if name == POSTTRAIN else "trl_side.py"
            with self._job(scenario, objective, TRIED + 1) as (job, _):
                side = job("side", setting, 1, _epochs(setting), False, script)
                measured = interleave.together({"side": side}, machine=False)["side"]
            peak = measured["peak"] - measured["imported"]
            self._keep("memory", scenario.name, objective, name, bytes=peak, imported=measured["imported"])
            _say(f"memory {scenario.name} {objective} {name}: {peak / 2**20:.0f} MiB")

    def vocabulary(self, size: int) -> None:
        """Read posttrain's high-water mark with a vocabulary of this size."""
        if self._has("vocabulary", str(size)):
            return
        base = SCENARIOS["short-answers"]
        scenario = replace(base, model=replace(base.model, vocabulary=size))
        with self._job(scenario, "sft", TRIED + 1) as (job, _):
            side = job("side", {}, 1, 1, False, "posttrain_side.py")
            measured = interleave.together({"side": side}, machine=False)["side"]
        peak = measured["peak"] - measured["imported"]
        self._keep("vocabulary", str(size), bytes=peak, needed=needed(scenario.model))
        _say(
            f"vocabulary {size}: {peak / 2**20:.0f} MiB, {peak / needed(scenario.model):.2f} of what is needed"
        )

    def rows(self) -> None:
        """Take the same number of steps through datasets of several sizes, in turns."""
        if self._has("rows"):
            return
        scenario, steps = SCENARIOS["short-answers"], max(20, self.repeats)
        batch = scenario.batch["sft"]
        with self._job(scenario, "sft", max(ROW_COUNTS) // batch) as (job, _):
            sides = {}
            for count in ROW_COUNTS:
                script, made = job(f"rows-{count}", {"max_steps": steps}, 1, None, False, "posttrain_side.py")
                sides[str(count)] = script, made | {"count": count}
            measured = interleave.together(sides)
        self._keep("rows", sides=measured, batch=batch, steps=steps)
        _say("rows " + ", ".join(f"{count}: {statistics.median(measured[str(count)]['seconds']['step'][1:]):.3f}"
                                 for count in ROW_COUNTS))  # fmt: skip

    def best_name(self, scenario: Scenario, objective: str) -> str:
        """Name TRL's fastest setting."""
        tried = trl_grid(objective, scenario.batch[objective])
        times = {name: self.found.get(("grid", scenario.name, objective, name)) for name in tried}
        missing = [name for name, record in times.items() if record is None]
        if missing:
            raise SystemExit(f"{scenario.name} {objective}: the grid lacks {', '.join(missing)}")
        return min(tried, key=lambda name: times[name]["seconds"])  # type: ignore[index]

    def best(self, scenario: Scenario, objective: str) -> dict[str, Any]:
        """Return TRL's fastest setting."""
        return self.setting(scenario, objective, self.best_name(scenario, objective))

    def setting(self, scenario: Scenario, objective: str, name: str) -> dict[str, Any]:
        """Return a setting of the grid."""
        return trl_grid(objective, scenario.batch[objective])[name]

    def _job(self, scenario: Scenario, objective: str, steps: int) -> _Jobs:
        return _Jobs(self.cache, scenario, objective, steps * scenario.batch[objective])

    def _has(self, *key: str) -> bool:
        record = self.found.get(key)
        if record is None or key[0] in self.again:
            return False
        return key[0] == "grid" or record["commit"] == self.commit

    def _keep(self, *key: str, **facts: Any) -> None:
        record = {"key": key, "commit": self.commit, "at": time.strftime("%Y-%m-%d %H:%M"), **facts}
        self.found[key] = record
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


class _Jobs:
    """A scratch directory with the rows of a measurement, and the jobs of its sides."""

    def __init__(self, cache: Path, scenario: Scenario, objective: str, count: int) -> None:
        self.model = materials.model_directory(scenario.model, cache)
        self.scenario, self.objective, self.count = scenario, objective, count

    def __enter__(self) -> tuple[Any, int]:
        self.scratch = Path(tempfile.mkdtemp(prefix="speed-"))
        self.path = self.scratch / "rows.jsonl"
        drawn = materials.rows(self.scenario, self.objective, self.count)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in drawn))
        return self.job, self.count

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.scratch)

    def job(
        self,
        name: str,
        setting: Mapping[str, Any],
        references: int,
        epochs: int | None,
        gradient: bool = False,
        script: str = "trl_side.py",
    ) -> tuple[str, dict[str, Any]]:
        """Return the script and the job of a side."""
        job = {
            "directory": str(self.scratch / name),
            "model": str(self.model),
            "rows": str(self.path),
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


def step_seconds(seconds: Mapping[str, list[float]], setting: Mapping[str, Any], steps: int) -> float:
    """Return the seconds of a step, its share of a pass over the reference included.

    Settings that choose the rows of a step themselves are timed by their second epoch.
    """
    times, epochs = seconds["step"], _epochs(setting)
    step = statistics.median(times[1:]) if epochs == 1 else sum(times[len(times) // 2 :]) / steps
    return step + reference_seconds(seconds) / steps


def tried_seconds(seconds: Mapping[str, list[float]], unordered: bool) -> float:
    """Return the seconds of a step by the fastest of several passes over the same rows, less the first pass."""
    times = seconds["step"]
    each = len(times) // PASSES
    passes = [times[start : start + each] for start in range(0, len(times), each)]
    if unordered:
        step = min(map(sum, passes[1:])) / TRIED
    else:
        step = statistics.mean(min(again) for again in zip(*passes[1:], strict=True))
    return step + reference_seconds(seconds) / TRIED


def reference_seconds(seconds: Mapping[str, list[float]]) -> float:
    """Return the seconds of a pass of its own over the reference; none without one."""
    return statistics.median(seconds.get("reference", [0.0]))


def _epochs(setting: Mapping[str, Any]) -> int:
    return 2 if setting.get("unordered") else 1


def difference(one: str, other: str) -> float:
    """Return the largest difference of two gradients, relative to the largest element of its tensor."""
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    if set(ours) != set(theirs):
        raise SystemExit(f"gradients of other parameters: {sorted(set(ours) ^ set(theirs))[:4]}")
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


def needed(shape: Shape) -> int:
    """Bytes of weights, gradients, both moments of the optimizer and two buffers of the head's size."""
    return 4 * (4 * shape.parameters + 2 * shape.vocabulary * shape.width)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a results file; the last line may have been cut off."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def _key(record: Mapping[str, Any]) -> Key:
    return tuple(record["key"])


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(given)


def run(asked: argparse.Namespace) -> None:
    """Measure what is asked for: of each scenario the whole grid before its race."""
    bench = Bench(asked.results, asked.again, asked.repeats)
    for name in asked.only:
        for objective in asked.objectives:
            for part in ("grid", "race", "memory"):
                if part in asked.parts:
                    getattr(bench, part)(SCENARIOS[name], objective)
    if "vocabulary" in asked.parts:
        for size in VOCABULARIES:
            bench.vocabulary(size)
    if "rows" in asked.parts:
        bench.rows()


if __name__ == "__main__":
    run(arguments(sys.argv[1:]))
