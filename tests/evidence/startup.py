"""How long the command takes where it does nothing heavy, against the limits the project sets itself."""

from __future__ import annotations

import sys
from pathlib import Path

import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import startup as benchmark

LIMITS = {"--help": 0.5, "plugins list": 1.0, "plan quickstart": 2.0, "run quickstart, all cached": 3.0}


def main() -> None:
    """Measure and write the evidence."""
    seconds = benchmark.measured(repeats=5)
    lines = [
        "Median of five runs in fresh processes, after one that warms the disk.",
        "",
        "| command | seconds | limit |",
        "|---|---|---|",
        *(f"| `posttrain {name}` | {seconds[name]:.2f} | {LIMITS[name]:.1f} |" for name in seconds),
    ]
    ledger.write("startup", "Start-up of the command", "python -m tests.evidence startup", lines, seconds)


if __name__ == "__main__":
    main()
