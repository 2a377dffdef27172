"""The metrics of one node: what its attempts streamed, and its key figures. Imports nothing heavy."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.execution.journal import events_of
from posttrain_pipelines.tracking.view import NodeView

Point = tuple[str, int]
"""A metric's name and its step."""

_OTHER = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass
class Measures:
    """Finite values and their times (seconds since the epoch) by metric and step.

    `nonfinite` names the metrics of which values were left out.
    """

    values: dict[Point, tuple[float, float]] = field(default_factory=dict)
    nonfinite: set[str] = field(default_factory=set)

    def add(self, name: str, step: int, value: float | None, moment: float) -> None:
        """Take a value in; a later one for the same metric and step replaces it."""
        if value is None or not math.isfinite(value):
            self.nonfinite.add(name)
        else:
            self.values[metric_name(name), step] = (value, moment)


def measures_of(directory: Path, node: NodeView) -> Measures:
    """Collect a node's metrics. Where a resumed attempt repeats a step, the later attempt counts.

    Args:
        directory: The node's directory, with one for each attempt.
        node: The node; its key figures appear as `final/<name>` at the number of its attempt.
    """
    found = Measures()
    for attempt in sorted(set(node.attempts)):
        for event in events_of(directory / str(attempt), "metrics"):
            for name, value in event["values"].items():
                found.add(name, event["step"], value, event["time"])
    for name, value in node.figures.items():
        found.add(f"final/{name}", node.attempt, value, node.ended or node.started)
    return found


def metric_name(name: str) -> str:
    """Return a name that MLflow takes: other characters become `_`, and slashes that separate nothing too."""
    plain = _OTHER.sub("_", name)[:249]
    names_itself = plain == posixpath.normpath(plain) and plain[0] not in "./"
    return plain if names_itself else "_" + re.sub(r"[./]", "_", plain)
