"""Positions that depend on the longest row of a pass are used up to where they do not, and refused beyond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.laid_out import alone, build, dynamic, example, gemma3, gpt2, llama, logp, longrope
from helpers.stepping import examples, stepper
from helpers.training import completion_rows, context_for, model_artifact, train

from posttrain.errors import StageError
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.positions import reach, require_reach

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "limit"), [(dynamic, 64), (longrope, 32), (llama, None), (gpt2, None), (gemma3, None)]
)
def test_the_reach_is_where_positions_begin_to_depend_on_company(
    config: Callable[[], Any], limit: int | None
):
    model = build(config).eval()
    assert reach(model) == limit
    short, within, beyond = (
        example(4, (6,)),
        example(4, ((limit or 64) - 4,)),
        example(4, ((limit or 64) + 4,)),
    )
    if config is gpt2:
        return  # it has no position beyond its longest
    with torch.no_grad():
        plain = alone(model, [short])
        beside = {
            row.longest: logp(model, LAYOUTS["padded"], [short, row])[: len(plain)]
            for row in (within, beyond)
        }
    assert (beside[within.longest] - plain).abs().max() < 1e-5
    assert bool((beside[beyond.longest] - plain).abs().max() > 1e-3) == (limit is not None)
    require_reach(limit, [short, within])
    if limit is not None:
        with pytest.raises(StageError, match="depend on the longest row") as caught:
            require_reach(limit, [short, within, beyond])
        assert caught.value.fix == f"set `max_length: {limit}`"


def test_a_type_for_each_kind_of_layer_counts_too():
    model = build(gemma3)
    rotary = next(module for module in model.modules() if hasattr(module, "rope_type"))
    rotary.rope_type = {**rotary.rope_type, "full_attention": "dynamic"}
    assert reach(model) == 64


def test_a_step_refuses_longer_rows():
    made = stepper("train.sft", "nll", max_position_embeddings=8, rope_parameters=DYNAMIC)
    with pytest.raises(StageError, match="depend on the longest row"):
        made.backward(examples("train.sft"))


def test_a_training_refuses_them_before_its_first_step(tmp_path: Path):
    model = model_artifact(tmp_path / "model", max_position_embeddings=12, rope_parameters=DYNAMIC)
    context = context_for(
        tmp_path, "train.sft", model, completion_rows(4), "prompt_completion", max_length=100, max_steps=1
    )
    with pytest.raises(StageError, match="depend on the longest row") as caught:
        train(context)
    assert caught.value.fix == "set `max_length: 12`"
    assert not context.seen_metrics
