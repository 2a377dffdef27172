"""Writes the README's table of speeds from `docs/evidence/speed*.json`.

`python tests/docs/speed_table.py`; a test fails while the table is not what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)
SHAPES = {
    "short-answers": "short answers: prompts of 60 tokens, answers of 14",
    "long-prompts": "long prompts: 390 and 20",
    "long-answers": "long answers: 38 and 390",
    "small-vocabulary": "64 symbols, a million parameters: 20 and 10",
}
"""What the README says of the four main shapes; tokens are medians."""
OBJECTIVES = {
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "orpo": "ORPO",
    "cpo": "CPO",
    "reward": "reward model",
}


def ratios() -> Mapping[tuple[str, str], float]:
    """Return how many times faster than TRL's fastest setting each race was, by shape and objective."""
    found: dict[tuple[str, str], float] = {}
    for name in ("speed", "speed-offline"):
        results = json.loads((ROOT / "docs" / "evidence" / f"{name}.json").read_text())["results"]
        for key, race in dict(results).items():
            shape, objective = key.split(", ")
            found[shape, objective] = race["ratio"]
    return found


def table() -> str:
    """Return the table."""
    found = ratios()
    rows = [
        ["", *OBJECTIVES.values()],
        ["---"] * (len(OBJECTIVES) + 1),
        *([SHAPES[shape], *(_cell(found.get((shape, each))) for each in OBJECTIVES)] for shape in SHAPES),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}×"


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: table(), README.read_text(encoding="utf-8")), encoding="utf-8")
