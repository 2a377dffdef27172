"""posttrain's training loop against TRL's: times, memory and gradients. See `tests/benchmarks/speed/measure.py`.

Arguments are those of `measure.py`; `--parts` without anything after it writes the pages from what is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "speed"))
import measure
import plot
import report


def main(arguments: list[str]) -> None:
    """Measure what is not measured yet and write the evidence."""
    asked = measure.arguments(arguments)
    found = measure.run(asked).found
    command = " ".join(["python -m tests.evidence speed", *arguments])
    rows = report.table(found)
    lines = ["![ratios](speed.svg)", "", *report.page(found)]
    ledger.write("speed", "Speed and memory of the training loop", command, lines, report.figures(found))
    grid = {" / ".join(key): record["seconds"] for key, record in found.items() if key[0] == "grid"}
    ledger.write("speed-grid", "Settings of TRL that were tried", command, report.grid_page(found), grid)
    (ledger.OUT / "speed.svg").write_text(plot.ratios(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
