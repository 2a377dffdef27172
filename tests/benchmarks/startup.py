"""How long the command takes where it does nothing heavy. Prints medians in seconds as JSON.

    python tests/benchmarks/startup.py [REPEATS]

The cached run is one of the quickstart at its smallest, built once beforehand by the sequential runner.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, Sequence[str]] = {
    "--help": ("--help",),
    "plugins list": ("plugins", "list"),
    "plan quickstart": ("plan", "quickstart"),
    "run quickstart, all cached": ("run", "quickstart", "--tiny"),
}

VERDICTS = (0, 3, 4)


def posttrain(*arguments: str, directory: str) -> float:
    """Run the command and return the seconds it took; a gate may say no to the smallest of all models."""
    command = [sys.executable, "-m", "posttrain", *arguments]
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    if ended.returncode not in VERDICTS:
        raise SystemExit(f"{' '.join(command)} exited with {ended.returncode}")
    return seconds


def measured(repeats: int) -> dict[str, float]:
    """Return the median of each command, one round after the other."""
    with tempfile.TemporaryDirectory() as directory:
        posttrain("run", "quickstart", "--tiny", "--runner", "sequential", directory=directory)
        rounds = [
            {name: posttrain(*command, directory=directory) for name, command in COMMANDS.items()}
            for _ in range(repeats + 1)
        ][1:]
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in COMMANDS}


if __name__ == "__main__":
    times = measured(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "system": platform.platform()}
    print(json.dumps({"seconds": times, "machine": machine}, indent=1))
