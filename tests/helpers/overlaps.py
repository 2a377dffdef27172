"""Rows whose overlaps are looked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from helpers.stages import configured

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import Input
from posttrain_plugins.data.load import Load
from posttrain_plugins.data.similarity.exposure import Exposure, RowSet, exposures
from posttrain_plugins.data.similarity.overlap import Measure

Row = dict[str, Any]


def text(seed: int, count: int = 30) -> str:
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(5000)}" for _ in range(count))


def asks(*prompts: str) -> list[Row]:
    return [{"prompt": prompt} for prompt in prompts]


def answers(*pairs: tuple[str, str]) -> list[Row]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def compared(
    training: Sequence[Row],
    evaluation: Sequence[Row],
    formats: tuple[str, str] = ("prompt_completion", "prompt"),
    **measure: Any,
) -> Exposure:
    sets = [
        RowSet(name, format, lambda rows=rows: rows)
        for name, format, rows in zip(("train", "test"), formats, (training, evaluation), strict=True)
    ]
    return exposures(sets[:1], sets[1:], Measure(**measure))


def hits(*arguments: Any, **measure: Any) -> dict[int, tuple[int, int, float]]:
    """For each evaluation row that is hit: the training row, the longest overlap, the coverage."""
    (found,) = compared(*arguments, **measure).evaluations
    return {row: (hit.row, hit.longest, round(hit.coverage, 4)) for (row, _), hit in found.hits.items()}


TRAINING = answers((f"please: {text(20)}", "yes"), (text(21), "no"), ("hello there", "well"))

EVALUATION = asks(text(20), text(22), "hello there", text(23))


def some(origin: str) -> Input:
    return Input(origin, Kind.DATASET, Load().predict(configured(Load(), path="gone.csv"), {})["data"].facts)
