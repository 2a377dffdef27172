"""What trl's training of a process reward model and posttrain's start from: one model, the same rows and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.models import as_artifact
from helpers.training import model_artifact

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.models.valued import open_valued, save_valued

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "last-step": {"train_on_last_step_only": True},
    "separator": {"step_separator": "; "},
    "truncated": {"max_length": 40},
}
"""Options that both have."""


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Answers of one to four steps with hard labels."""
    return [
        {
            "prompt": f"what is {i} + {i}? ",
            "completions": [f"take {i}", f"{i} again gives {i + i}", "so it is done", "ok"][: 1 + i % 4],
            "labels": [(i + step) % 3 > 0 for step in range(1 + i % 4)],
        }
        for i in range(count)
    ]


def start(directory: Path) -> Artifact:
    """Write the tiny model with a fresh head of two outputs that both train."""
    policy = model_artifact(directory / "policy", hidden_size=32)
    opened = open_valued(policy, None, Kind.PROCESS_REWARD_MODEL, seed=7)
    made = directory / "start"
    made.mkdir()
    return as_artifact(made, save_valued(made, opened.model, policy.path), Kind.PROCESS_REWARD_MODEL)
