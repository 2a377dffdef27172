"""Schedules, float16 and recomputed activations."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.optimizing import arguments_of, same, sft
from helpers.training import (
    completion_rows,
    model_artifact,
    train,
    weights,
)
from pydantic import ValidationError

from posttrain.artifacts.manifest import Artifact
from posttrain.errors import Interrupted, StageError, TrainingDiverged
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training.schedules import SCHEDULES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    # Wide enough for 8-bit moments, which small tensors do not get.
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


CURVES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({"warmup_steps": 1}, [0, 1, 0.75, 0.5, 0.25]),
    "constant": ({}, [1] * 5),
    "constant_with_warmup": ({"warmup_steps": 2}, [0, 0.5, 1, 1, 1]),
    "cosine": ({"warmup_steps": 1}, [0, 1, cosine(0.25), cosine(0.5), cosine(0.75)]),
    "cosine_with_restarts": (
        {"warmup_steps": 1, "lr_scheduler_kwargs": {"num_cycles": 2}},
        [0, 1, cosine(0.5), 1, cosine(0.5)],
    ),
    "cosine_with_min_lr": (
        {"warmup_steps": 1, "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
        [0, 1, *(0.8 * cosine(share) + 0.2 for share in (0.25, 0.5, 0.75))],
    ),
    "polynomial": (
        {"warmup_steps": 1, "lr_scheduler_kwargs": {"lr_end": 2e-4, "power": 2}},
        [0, 1, *(0.8 * (1 - share) ** 2 + 0.2 for share in (0.25, 0.5, 0.75))],
    ),
    "inverse_sqrt": ({"lr_scheduler_kwargs": {"timescale": 4}}, [(1 + k / 4) ** -0.5 for k in range(5)]),
    "warmup_stable_decay": (
        {
            "warmup_steps": 2,
            "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "linear", "warmup_type": "linear"},
        },
        [0, 0.5, 1, 1, 0.5],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_its_curve(tmp_path: Path, model: Artifact, name: str):
    options, curve = CURVES[name]
    chosen = {"lr_scheduler_type": name, "max_steps": 5, "learning_rate_groups": {"mlp": 1e-2}, **options}
    made = sft(tmp_path, model, **chosen)
    train(made)
    seen = made.seen_metrics
    found = [seen[step]["learning_rate"] / 1e-3 for step in range(1, 6)]
    assert found == pytest.approx(curve, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "of linear: `num_cycles` is unknown; it takes nothing"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 2}}, "`cycles` is unknown"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "`num_cycles` is missing"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "give either min_lr or min_lr_rate"),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.1},
            },
            "give either",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1.0}},
            "not below learning_rate",
        ),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "not below"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "`num_decay_steps` is missing"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2, "warmup_type": "cosine"},
            },
            "warmup_type would be ignored",
        ),
        ({"optim": "sgd", "optim_args": {"alpha": 1.0}}, "of sgd: `alpha` is unknown; it takes `momentum`"),
        ({"optim": "sgd", "optim_args": {"nesterov": True}}, "nesterov needs momentum"),
        ({"optim": "lion_32bit", "adam_epsilon": 1e-6}, "adam_epsilon would be ignored by lion_32bit"),
        ({"optim": "adafactor", "adam_beta1": 0.5}, "ignored by adafactor"),
        ({"learning_rate_groups": {"(": 1e-4}}, "no regular expression"),
        ({"learning_rate_groups": {"mlp": 0}}, "greater than 0"),
        ({"bf16": True, "fp16": True}, "exclude each other"),
        ({"optim": "paged_adamw_8bit"}, "Input should be"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        SftOptions(**options)


def test_a_schedule_longer_than_the_training_is_refused():
    config = SftOptions(
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=6,
        lr_scheduler_kwargs={"num_decay_steps": 5},
    )
    with pytest.raises(StageError, match="does not fit"):
        arguments_of(config)
    stage = catalogue().stage("train.sft")
    shrunk = stage.shrink(config)
    assert (shrunk["lr_scheduler_type"], shrunk["lr_scheduler_kwargs"], shrunk["warmup_steps"]) == (None,) * 3


# Float16

HEAVY = [{**row, "weight": 30} for row in completion_rows()]
"""Rows whose gradient overflows in float16 at the first scales."""


def test_float16_skips_overflows_without_moving_the_schedule(tmp_path: Path, model: Artifact):
    options = {"fp16": True, "max_steps": 8, "weight_column": "weight"}
    made = sft(tmp_path / "whole", model, HEAVY, **options)
    found = train(made)
    skipped = int(found.figures["skipped_steps"])
    assert 0 < skipped < 8
    assert found.steps == 8 - skipped
    seen = [made.seen_metrics[step] for step in range(1, 9)]
    counts = [int(values["skipped_steps"]) for values in seen]
    assert counts[0] == 1 and counts[-1] == skipped
    moves = [step - count for step, count in enumerate(counts, 1)]
    assert [values["learning_rate"] / 1e-3 for values in seen] == pytest.approx(
        [1 - before / 8 for before in [0, *moves[:-1]]]
    ), "the schedule stands still where a step is skipped"
    assert [values.get("grad_norm") is None for values in seen] == [
        count > before for before, count in pairwise([0, *counts])
    ]

    for stop in (1, 7):
        parts = tmp_path / f"parts-{stop}"
        first = sft(parts, model, HEAVY, **options)
        first.stop_at = stop
        with pytest.raises(Interrupted):
            train(first)
        again = train(sft(parts, model, HEAVY, **options))
        assert same(tmp_path / "whole", parts)
        assert again.figures == found.figures


def test_float16_is_close_to_float32_once_its_scale_is_found(tmp_path: Path, model: Artifact):
    options = {"batch_size": 10, "lr_scheduler_type": "constant"}
    half, full = sft(tmp_path / "half", model, fp16=True, **options), sft(tmp_path / "full", model, **options)
    skipped = int(train(half).figures["skipped_steps"])
    train(full)
    assert skipped < 3
    assert half.losses[skipped:] != full.losses[: 3 - skipped]
    assert half.losses[skipped:] == pytest.approx(full.losses[: 3 - skipped], rel=1e-3)
    assert {tensor.dtype for tensor in weights(tmp_path / "half/out-model").values()} == {torch.float32}


def test_overflows_without_an_end_stop_the_training(tmp_path: Path, model: Artifact):
    rows = [{**row, "weight": 1e30} for row in completion_rows()]
    with pytest.raises(TrainingDiverged, match="overflows in float16 at every scale") as caught:
        train(sft(tmp_path, model, rows, fp16=True, max_steps=40, weight_column="weight", save_steps=5))
    assert caught.value.where == "step 20"
    assert "20 steps in a row" in str(caught.value.found)
    assert "the last checkpoint, of step 15" in str(caught.value.fix)


# Recomputed activations


def test_adapters_on_frozen_embeddings_learn_with_recomputed_activations(tmp_path: Path, model: Artifact):
    runs = {}
    for name, recompute in (("off", False), ("on", True)):
        made = sft(
            tmp_path / name,
            model,
            max_steps=2,
            learning_rate=1e-2,
            lora={"r": 2},
            gradient_checkpointing=recompute,
        )
        train(made)
        runs[name] = made.losses
        tensors = weights(tmp_path / name / "out-model")
        norms = {key: float(tensor.norm()) for key, tensor in tensors.items() if "lora_B" in key}
        assert norms and all(norm > 0 for norm in norms.values())
    assert runs["on"] == pytest.approx(runs["off"], abs=1e-5)
    assert runs["on"][0] != runs["on"][1]
