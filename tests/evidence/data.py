"""Tokenizing, masking and packing conversations, against TRL's preparation. `--rows N` for fewer than 200,000."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "data"))
import preparation

ROWS = 200_000


def main(arguments: list[str]) -> None:
    """Measure and write the evidence."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence data")
    parser.add_argument("--rows", type=int, default=ROWS)
    rows = parser.parse_args(arguments).rows
    found = preparation.race(rows, ledger.ROOT / "build" / "data-race")
    command = " ".join(["python -m tests.evidence data", *arguments])
    ledger.write("data", "Preparing conversations", command, page(rows, found), found)


def page(rows: int, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the page."""
    ours = found[preparation.OURS]
    lines = [
        f"{rows:,} conversations of one to three questions and answers ({ours['tokens'] / rows:.0f} tokens each on"
        f" average, {ours['supervised'] / ours['tokens']:.0%} of them learned) are rendered, tokenized, masked and"
        f" packed into rows of {preparation.LENGTH} tokens, by every side on the same {preparation.THREADS} cores, one"
        " after the other. posttrain runs `data.tokenize` and `data.pack` from a dataset artifact (JSON lines) to one"
        " (Arrow); TRL's `SFTTrainer` prepares its dataset from Arrow to Arrow, with `packing=True` and, unless no"
        " masks are named, `assistant_only_loss=True`. Memory is what processes hold together beside pages of files.",
        "",
        "| | rows a second | times | packed rows | full | memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, side in found.items():
        lines.append(
            f"| {name} | {side['rate']:,.0f} | {ours['rate'] / side['rate']:.2f} | {side['rows']:,.0f}"
            f" | {side['efficiency']:.1%} | {side['peak_mib']:,.0f} MiB |"
        )
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in ours["parts"].items())
    lines += [
        "",
        f"`times`: how many times as fast posttrain is. Its parts: {parts}. TRL packs each 1,000 rows by themselves and"
        " cuts what is longer than a row; posttrain packs the whole dataset, and shortens in `data.tokenize`.",
    ]
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
