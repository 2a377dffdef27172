"""Reports about datasets on disk: figures in `report.json`, and a file with a line for each thing found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.manifest import canonical

REPORT = "report.json"


def write_report(
    directory: Path, report: Mapping[str, Any], name: str, lines: Iterable[Mapping[str, Any]]
) -> None:
    """Write a report.

    Args:
        directory: The output directory.
        report: What goes into `report.json`.
        name: The file for the lines, such as `hits.jsonl`.
        lines: One JSON object for each thing found.
    """
    text = json.dumps(report, indent=2, sort_keys=True, allow_nan=False)
    (directory / REPORT).write_text(text + "\n", encoding="utf-8")
    with (directory / name).open("wb") as file:
        file.writelines(canonical(line) + b"\n" for line in lines)
