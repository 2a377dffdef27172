"""posttrain's training loop against TRL's: times, memory and gradients. See `tests/benchmarks/speed/measure.py`.

Arguments are those of `measure.py`; `--parts` without anything after it writes the pages from what is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "speed"))
import comparison
import measure
import pages
import plot
import report


def main(arguments: list[str]) -> None:
    """Measure what is not measured yet and write the evidence."""
    asked = measure.arguments(arguments)
    found = measure.run(asked).found
    command = " ".join(["python -m tests.evidence speed", *arguments])
    for page in pages.PAGES:
        rows = comparison.table(found, page)
        if rows and set(page.objectives) & set(asked.objectives):
            _write(page, rows, found, command)


def _write(page: pages.Page, rows: list[comparison.Row], found: comparison.Found, command: str) -> None:
    (ledger.OUT / f"{page.name}.svg").write_text(plot.ratios(rows))
    lines = [f"![ratios]({page.name}.svg)", "", *report.lines_of(page, found)]
    ledger.write(page.name, page.title, command, lines, report.figures(page, found))
    tried = report.grid_figures(page, found)
    ledger.write(f"{page.name}-grid", page.grid, command, report.grid_lines(page, found), tried)


if __name__ == "__main__":
    main(sys.argv[1:])
