"""How a training is arranged on its machine: what is fixed before the first step and kept for every resume.

None of it changes what is trained but for rounding; all of it changes rounding, so a resume that is to be bit-equal
needs the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.artifacts.files import write_durably
from posttrain.contracts.backend import Parallel
from posttrain_plugins.training.batches import Budget

FILE = "arrangement.json"


@dataclass(frozen=True)
class Arrangement:
    """What is fixed.

    Args:
        tokens: Tokens of a micro-batch, padding included.
        supervised: Supervised tokens of a micro-batch; None: any number.
        layout: How examples are laid out in rows.
        kept: Bytes of logits that are kept for the backward pass; more are computed again.
        threads: Threads that one rank computes with; None where a GPU does.
        asked: The options it was decided from. Other options, another decision.
    """

    tokens: int
    supervised: int | None
    layout: str
    kept: int
    threads: int | None
    asked: dict[str, Any]

    @property
    def budget(self) -> Budget:
        """What a micro-batch may hold."""
        return Budget(self.tokens, self.supervised)

    def within(self, budget: Budget) -> Arrangement:
        """Return the same with another budget."""
        return replace(self, tokens=budget.tokens, supervised=budget.supervised)

    def write(self, directory: Path) -> None:
        """Keep it beside the checkpoints."""
        write_durably(directory / FILE, json.dumps(asdict(self), indent=1).encode())


def earlier(directory: Path, asked: dict[str, Any], parallel: Parallel) -> Arrangement | None:
    """Return the arrangement that this training started with, if the same was asked for.

    Rank 0 looks for all: it writes the file soon after, and a rank that is late would find that.
    """
    path = directory / FILE
    there = parallel.rank == 0 and path.is_file()
    kept = parallel.agree(json.loads(path.read_text()) if there else None)
    names = {field.name for field in fields(Arrangement)}
    # One of another version of posttrain may hold something else; then it is decided anew.
    return (
        Arrangement(**kept) if kept is not None and kept.keys() == names and kept["asked"] == asked else None
    )


def threads(device: torch.device) -> int | None:
    """Return the threads that this process computes with on a CPU."""
    return torch.get_num_threads() if device.type == "cpu" else None


def described(made: Arrangement, backend: str, resumed: bool) -> str:
    """Say for people how the training is arranged."""
    parts = [f"micro-batches of at most {made.tokens} tokens", f"{made.layout.replace('_', ' ')} rows"]
    ranks = made.asked["ranks"]
    if ranks > 1:
        parts.append(f"{ranks} ranks on {backend}")
    if made.threads is not None:
        parts.append(f"{made.threads} thread{'s' if made.threads > 1 else ''}{' each' if ranks > 1 else ''}")
    return f"{', '.join(parts)}{' (as before)' if resumed else ''}"
