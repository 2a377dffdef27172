"""Tiny models that give numbers, with random heads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from helpers.contexts import FakeContext
from helpers.models import as_artifact
from helpers.training import model_artifact

from posttrain.artifacts.kinds import Kind, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.reward import ModelReward, Scorer
from posttrain_plugins.models.valued import open_valued, save_valued
from posttrain_plugins.models.valued_record import write_record

SCORES = ScoreFacts(mean=0.25, deviation=0.5, separator="\n")


def judge_artifact(
    directory: Path, kind: Kind = Kind.REWARD_MODEL, scores: ScoreFacts | None = SCORES
) -> Artifact:
    """A model of a kind whose numbers tell answers apart."""
    policy = model_artifact(directory / "policy", initializer_range=0.3)
    opened = open_valued(policy, FakeContext(directory, None, None, {}), kind, seed=7)
    made = directory / "judge"
    made.mkdir()
    write_record(made, scores, [])
    return as_artifact(made, save_valued(made, opened.model, policy.path), kind)


def with_tiny_model(reward: ModelReward, config: Any) -> Scorer:
    """Open a reward with a tiny model of a kind that it judges with."""
    directory = Path(tempfile.mkdtemp())
    model = judge_artifact(directory, min(reward.models))
    return reward.open(model, FakeContext(directory, None, None, {"reward": [model]}), config)
