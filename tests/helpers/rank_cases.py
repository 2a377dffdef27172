"""What ranks are tried with: every backend, every kind of step."""

from __future__ import annotations

from typing import Any

from helpers.losses import REDUCTIONS

BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp2": {"name": "fsdp2"},
    "zero-1": {"name": "deepspeed", "stage": 1},
    "zero-2": {"name": "deepspeed", "stage": 2},
    "zero-3": {"name": "deepspeed", "stage": 3},
}
"""Of a step."""

CASES: dict[str, dict[str, Any]] = {
    **{str(each): {"loss": f"reduced-{each}"} for each in REDUCTIONS},
    "untied": {"loss": "nll", "tie_word_embeddings": False},
    "a rank without sequences": {"loss": "nll", "count": 1},
    "two passes of a measure": {"loss": "surprising"},
    "a measure where a rank has nothing": {"loss": "baseline", "uses": "train.dpo", "count": 1},
    "the step as a whole": {"loss": "centred"},
    "preferences": {"loss": "sigmoid", "uses": "train.dpo"},
    "packed rows": {"loss": "nll", "layout": "packed"},
    "shared prefixes": {"loss": "sigmoid", "uses": "train.dpo", "layout": "shared_prefix"},
    "one micro-batch each": {"loss": "nll", "tokens": 10_000},
}
"""What a step on two ranks is tried with: options of `helpers.rank_work.compare_steps`."""

TRAINED_ON: dict[str, Any] = {
    "single": "single",
    "ddp": {"name": "ddp", "ranks": 2},
    "fsdp2": {"name": "fsdp2", "ranks": 2},
    "zero-2": {"name": "deepspeed", "ranks": 2, "stage": 2},
    "zero-3": {"name": "deepspeed", "ranks": 2, "stage": 3},
}
"""Of whole trainings."""
