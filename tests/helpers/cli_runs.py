"""What the command line is watched with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.planning import Told, command

WORKSPACE = Path(".posttrain")


def run(pipeline: Path, *arguments: str) -> Told:
    return command("run", pipeline, "--runner", "inline", *arguments)


def parsed(told: Told) -> Any:
    return json.loads(told.out)
