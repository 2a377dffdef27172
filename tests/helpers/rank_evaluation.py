"""Evaluations and float16 on ranks. Importing it computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.models import tiny_llama
from helpers.rank_work import on_ranks, parallel_of
from helpers.stepping import encoder, examples, stepper
from helpers.training import completion_rows, context_for, train

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.backend import Parallel, Place
from posttrain.contracts.stage import StageContext
from posttrain_plugins.backends.single import Single


def evaluated(directory: Path, backend: Mapping[str, Any], sizes: Sequence[int]) -> dict[int, Any]:
    """Evaluate sets of some sizes in one process and on two ranks."""
    return on_ranks(directory, 2, partial(_evaluated, backend, sizes))  # type: ignore[no-any-return]


def _evaluated(
    backend: Mapping[str, Any], sizes: Sequence[int], context: StageContext, place: Place
) -> dict[int, Any]:
    parallel = parallel_of(backend, place)
    alone, together = _results(Single(), sizes), _results(parallel, sizes)
    parallel.close()
    return {size: (alone[size], together[size]) for size in sizes}


def _results(parallel: Parallel, sizes: Sequence[int]) -> dict[int, Any]:
    model = tiny_llama(encoder().vocabulary, attn_implementation="sdpa").train()
    parallel.prepare(model)
    made = stepper("train.sft", "nll", 60, model=model)
    made.parallel = parallel
    made.model, _ = parallel.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for size in sizes:
        result = made.evaluate(examples("train.sft", size))
        found[size] = {"loss": result.loss, **result.metrics}
    return found


def in_float16(directory: Path, model: Artifact, backend: Any) -> tuple[dict[str, float], list[float]]:
    """Train in float16 on rows that overflow at first; return figures and how many steps were skipped by then."""
    rows = [{**row, "weight": 30} for row in completion_rows()]
    options = {
        "batch_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 8,
        "weight_column": "weight",
        "fp16": True,
    }
    context = context_for(
        directory, "train.sft", model, rows, "prompt_completion", backend=backend, **options
    )
    figures = dict(train(context).figures)
    return figures, [values["skipped_steps"] for values in context.seen_metrics.values()]
