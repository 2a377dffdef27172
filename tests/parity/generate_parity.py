"""Writes the tables of `docs/parity.md` from what is found when posttrain and TRL prepare the same rows.

Run it after a change of templates, masks or of TRL's version: `.venv/bin/python tests/parity/generate_parity.py`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.trl_page import PAGE, Findings, sections, written


def main() -> None:
    """Compare everything and write the page."""
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as directory:
        parts = sections(Findings(Path(directory)))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
