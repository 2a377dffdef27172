"""Measurements: the file they are kept in, and the figures that are taken from them."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scenarios import Shape

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "build" / "speed" / "results.jsonl"
CLOCKS = ("seconds", "processor")

Key = tuple[str, ...]
Seconds = Mapping[str, list[float]]


class Results:
    """A file with one JSON line a measurement; the last one of a key counts.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.commit, self.code = path, _commit(), _code()
        self.found: dict[Key, dict[str, Any]] = {tuple(record["key"]): record for record in read(path)}

    def has(self, key: Key, ours: bool) -> bool:
        """Tell whether something is measured, and with today's code where that matters."""
        record = self.found.get(key)
        return record is not None and (not ours or record["code"] == self.code)

    def keep(self, key: Key, **facts: Any) -> None:
        """Add a measurement."""
        about = {"commit": self.commit, "code": self.code, "at": time.strftime("%Y-%m-%d %H:%M")}
        self.found[key] = {"key": key, **about, **facts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as lines:
            lines.write(json.dumps(self.found[key]) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a file; a line that was cut off is not one."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)


WARM = 8
"""Steps before the times of a race count, unless it says otherwise: kernels are made for the first shapes, and memory
is touched first."""
WATCHED, SETTLED, TIMED = 4, 12, 6
"""Steps of a profile whose memory is watched; steps before those whose time is taken; and how many these are."""


def step_seconds(seconds: Seconds, epochs: int, steps: int, warm: int = WARM) -> float:
    """Return the seconds of a step, its share of a pass over the reference included.

    The median without the first steps; by the second of two epochs where a side chooses the rows of a step.

    Args:
        seconds: Of each piece of work, by kind.
        epochs: One or two.
        steps: Steps of an epoch, as the batch size has it.
        warm: Steps that do not count.
    """
    times = seconds["step"]
    step = statistics.median(times[warm:]) if epochs == 1 else sum(times[len(times) // 2 :]) / steps
    return step + reference_seconds(seconds) / steps


def tried_seconds(seconds: Seconds, unordered: bool, passes: int, steps: int) -> float:
    """Return the seconds of a step by the fastest of several passes over the same rows, less the first pass."""
    times = seconds["step"]
    each = len(times) // passes
    runs = [times[start : start + each] for start in range(0, len(times), each)][1:]
    if unordered:
        step = min(map(sum, runs)) / steps
    else:
        step = statistics.mean(min(again) for again in zip(*runs, strict=True))
    return step + reference_seconds(seconds) / steps


def reference_seconds(seconds: Seconds) -> float:
    """Return the seconds of a pass of its own over the reference; none without one."""
    return statistics.median(seconds.get("reference", [0.0]))


def difference(one: str, other: str) -> float:
    """Return the largest difference of two gradients, relative to the largest element of all."""
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    if set(ours) != set(theirs):
        raise SystemExit(f"gradients of other parameters: {sorted(set(ours) ^ set(theirs))[:4]}")
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest


def needed(shape: Shape) -> int:
    """Bytes of weights, gradients, both moments of the optimizer and two buffers of the head's size."""
    return 4 * (4 * shape.parameters + 2 * shape.vocabulary * shape.width)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _code() -> str:
    """Digest what is measured, so that a page of documentation does not make measurements stale."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
