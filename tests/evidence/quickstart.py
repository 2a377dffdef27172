"""How long the quickstart takes with the code of an earlier commit and with today's, in turns, and what it comes to.

Both run the recipe of the earlier commit: today's has more stages.

    python -m tests.evidence quickstart [--before COMMIT] [--repeats N]

The commit that is compared with unless another is named is the last one whose trainers each had a loop of their own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ledger

BEFORE = "9994fe9"
PACKAGES = ("core", "plugins", "pipelines")
RECIPE = "pipelines/posttrain_pipelines/recipes/quickstart.yaml"
TRAINED = ("sft", "dpo")


@dataclass(frozen=True)
class Taken:
    """One run.

    Args:
        seconds: From the command to its end, the start of the server included.
        stages: Seconds of each training.
        figures: What the evaluation found of each model.
    """

    seconds: float
    stages: dict[str, float]
    figures: dict[str, float]


def run(code: Path, recipe: str, scratch: Path) -> Taken:
    """Run a recipe in a fresh workspace with the packages of a directory."""
    workspace = scratch / ".posttrain"
    paths = os.pathsep.join(str(code / package) for package in PACKAGES)
    (scratch / "quickstart.yaml").write_text(recipe)
    began = time.perf_counter()
    ledger.posttrain("run", "quickstart.yaml", workspace=workspace, env={"PYTHONPATH": paths})
    seconds = time.perf_counter() - began
    records = [json.loads(path.read_text()) for path in (workspace / "store" / "keys").glob("*.json")]
    nodes = {record["node"]: record for record in records}
    matches = {name: value for name, value in nodes["eval"]["figures"].items() if "exact_match" in name}
    return Taken(seconds, {name: nodes[name]["seconds"] for name in TRAINED}, matches)


def unpacked(commit: str, directory: Path) -> Path:
    """Write the packages of a commit to a directory."""
    packed = subprocess.run(
        ["git", "archive", commit, *PACKAGES], cwd=ledger.ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def file_of(commit: str, path: str) -> str:
    """Return a file of a commit."""
    command = ["git", "show", f"{commit}:{path}"]
    return subprocess.run(command, cwd=ledger.ROOT, capture_output=True, text=True, check=True).stdout


def lines_of(before: str, taken: dict[str, list[Taken]]) -> list[str]:
    """Return the page's lines."""

    def median(runs: list[Taken], stage: str | None = None) -> float:
        return statistics.median(each.seconds if stage is None else each.stages[stage] for each in runs)

    def span(runs: list[Taken]) -> str:
        seconds = [each.seconds for each in runs]
        return f"{min(seconds):.1f} to {max(seconds):.1f}"

    rows = [
        f"| {name} | {median(runs):.1f} | {span(runs)} | "
        + " | ".join(f"{median(runs, stage):.1f}" for stage in TRAINED)
        + f" | {_matches(runs)} |"
        for name, runs in taken.items()
    ]
    return [
        f"`posttrain run quickstart` in fresh workspaces, {len(next(iter(taken.values())))} runs of each, in turns: the"
        f" code of commit `{before}`, the last before all trainers got one loop, and today's, with the recipe as it was"
        " then. Seconds; medians.",
        "",
        "| code | whole run | least to most | " + " | ".join(TRAINED) + " | exact match |",
        "|" + "---|" * (4 + len(TRAINED)),
        *rows,
        "",
        "Stages run beside each other where they can, and a stage's seconds are those of its process. Losses and",
        "gradients are the same to rounding (`tests/parity`, [equality](equality.md)); which answers the model",
        "samples, and so the pairs that DPO learns from, hangs on the last bits, and exact match with it: another cut",
        "into micro-batches moves it as much.",
    ]


def _matches(runs: list[Taken]) -> str:
    """Return what was found of each model, which is the same in every run."""
    found = {tuple(f"{value:.4f}" for value in sorted(each.figures.values())) for each in runs}
    return "; ".join(", ".join(each) for each in sorted(found))


def main(arguments: list[str]) -> None:
    """Measure and write the evidence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default=BEFORE, help="the commit that is compared with")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    taken: dict[str, list[Taken]] = {asked.before: [], "today": []}
    with tempfile.TemporaryDirectory() as scratch:
        recipe = file_of(asked.before, RECIPE)
        sides = {asked.before: unpacked(asked.before, Path(scratch) / "before"), "today": ledger.ROOT}
        for number in range(asked.repeats):
            for name, code in sides.items():
                room = Path(scratch) / f"{number}-{name}"
                room.mkdir()
                taken[name].append(run(code, recipe, room))
                sys.stdout.write(f"{name}: {taken[name][-1].seconds:.1f} s\n")
    data: dict[str, Any] = {name: [vars(each) for each in runs] for name, runs in taken.items()}
    command = " ".join(["python -m tests.evidence quickstart", *arguments])
    ledger.write(
        "quickstart", "The quickstart before and after the loop", command, lines_of(asked.before, taken), data
    )


if __name__ == "__main__":
    main(sys.argv[1:])
