"""What the projection into MLflow costs. Prints seconds as JSON.

    python tests/benchmarks/tracking.py [RUNS]

The runs are synthetic: journals and event streams as the execution writes them, in a temporary workspace.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.runs import SyntheticRun, sft_and_dpo

from posttrain_pipelines.tracking.tracker import MlflowTracker

STEPS = 5000
"""Two metrics each."""


def seconds(act: Callable[[], object]) -> float:
    """Return how long something takes."""
    began = time.perf_counter()
    act()
    return round(time.perf_counter() - began, 3)


def measured(workspace: Path, runs: int) -> dict[str, float]:
    """Sync and look at small runs, at one with many metrics, and at many past runs."""
    tracker, found = MlflowTracker(), {}
    sft_and_dpo(workspace)
    found["first sync of a process: import, new schema, three nodes"] = seconds(
        lambda: tracker.sync(workspace, "r1")
    )
    found["sync with nothing to add"] = seconds(lambda: tracker.sync(workspace, "r1"))
    long = SyntheticRun(workspace, "r2")
    with long.record.claimed():
        long.begin()
        long.start("sft")
        for step in range(STEPS):
            long.metrics("sft", step, loss=1.0, lr=2.0)
        found[f"sync of {2 * STEPS} metric values"] = seconds(lambda: tracker.sync(workspace, "r2"))
        long.metrics("sft", STEPS, loss=1.0)
        found["sync of one step more after that"] = seconds(lambda: tracker.sync(workspace, "r2"))
        long.end("sft")
        long.finish()
    tracker.sync(workspace, "r2")
    os.utime(long.record.journal.path)
    found[f"`behind` by the database, {2 * STEPS} metric values"] = seconds(
        lambda: tracker.behind(workspace, "r2")
    )
    names = [f"s{number:04}" for number in range(runs)]
    for name in names:
        past = SyntheticRun(workspace, name)
        past.begin()
        past.start("sft")
        past.metrics("sft", 1, loss=1.0)
        past.end("sft")
        past.finish()
        tracker.sync(workspace, name)
    found[f"`behind` of {runs} past runs, by their notes"] = seconds(
        lambda: [tracker.behind(workspace, name) for name in names]
    )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        times = measured(Path(directory), int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.platform()}
    print(json.dumps({"seconds": times, "machine": machine}, indent=1))
