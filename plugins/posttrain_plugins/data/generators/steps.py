"""A seeded task whose answers come in steps, each of them right or wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Config
from posttrain.errors import DataError

_DRAWS = 1000
"""Draws of a prompt in a row that may all have been seen before, until there seem to be no more."""


class RunningSumConfig(Config):
    """The sums to write down step by step."""

    min_terms: int = Field(default=4, ge=2, description="fewest digits to add up")
    max_terms: int = Field(default=7, ge=2, description="most digits to add up")
    base: int = Field(
        default=10, ge=2, le=10, description="digits are below this, and sums are taken modulo it"
    )
    careless: float = Field(
        default=0.6,
        ge=0.0,
        le=1.0,
        description="the share of answers in which a step is wrong, and all after it",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms {self.min_terms} is above max_terms {self.max_terms}")
        return self


class RunningSum:
    """Add digits up modulo 10 (or `base`), a step for each: `3+9+4` is answered with `3+9=2` and `2+4=6`.

    A careless answer goes wrong at one step and goes on from there, so that its later steps are wrong too, although
    each follows from the one before. `labels` says up to where an answer is right.
    """

    config = RunningSumConfig
    format = "stepwise"
    columns = ("prompt", "completions", "labels", "answer")

    def __call__(self, config: RunningSumConfig, rows: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield `rows` rows with different prompts.

        Raises:
            DataError: There are not that many sums.
        """
        draw, seen = random.Random(seed), set[tuple[int, ...]]()
        for _ in range(rows):
            terms = _unseen(draw, config, seen)
            slip = draw.randrange(1, len(terms)) if draw.random() < config.careless else len(terms)
            yield _row(terms, slip, config.base, draw)


def _unseen(draw: random.Random, config: RunningSumConfig, seen: set[tuple[int, ...]]) -> tuple[int, ...]:
    for _ in range(_DRAWS):
        count = draw.randint(config.min_terms, config.max_terms)
        terms = tuple(draw.randrange(config.base) for _ in range(count))
        if terms not in seen:
            seen.add(terms)
            return terms
    raise DataError(
        "`running_sum` finds no more different prompts",
        found=f"{len(seen)} of them",
        fix="ask for fewer rows, or give it a larger `max_terms`",
    )


def _row(terms: tuple[int, ...], slip: int, base: int, draw: random.Random) -> dict[str, Any]:
    """Write the steps down; from step number `slip` (from 1) on they are off by the same amount."""
    right = [total % base for total in accumulate(terms)]
    off = draw.randrange(1, base)
    written = [total if at < slip else (total + off) % base for at, total in enumerate(right)]
    steps = [f"{written[at - 1]}+{terms[at]}={written[at]}" for at in range(1, len(terms))]
    return {
        "prompt": [{"role": "user", "content": "+".join(map(str, terms))}],
        "completions": steps,
        "labels": [at < slip for at in range(1, len(terms))],
        "answer": str(right[-1]),
    }
