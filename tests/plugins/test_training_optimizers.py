"""Optimizers, learning rates, schedules and precisions: each does what its name says, also after a resume."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.models import tiny_llama
from helpers.training import (
    Context,
    completion_rows,
    context_for,
    dataset_artifact,
    model_artifact,
    train,
    weights,
)
from pydantic import ValidationError

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input
from posttrain.errors import Interrupted, StageError, TrainingDiverged
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training import groups
from posttrain_plugins.training.optimizers import OPTIMIZERS, OptimizerName
from posttrain_plugins.training.schedules import SCHEDULES, ScheduleName

BASE: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-3, "max_steps": 3, "save_steps": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    # Wide enough for 8-bit moments, which small tensors do not get.
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def sft(
    directory: Path, model: Artifact, rows: list[dict[str, Any]] | None = None, **options: Any
) -> Context:
    rows = rows or completion_rows()
    return context_for(directory, "train.sft", model, rows, "prompt_completion", **{**BASE, **options})


def moved(model: Artifact, directory: Path) -> dict[str, float]:
    """The largest change of each tensor."""
    start, end = weights(model.path), weights(directory / "out-model")
    return {name: float((end[name] - start[name]).abs().max()) for name in start}


def same(one: Path, other: Path) -> bool:
    a, b = weights(one / "out-model"), weights(other / "out-model")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupted(directory: Path, model: Artifact, stop: int, **options: Any) -> Context:
    first = sft(directory, model, **options)
    first.stop_at = stop
    with pytest.raises(Interrupted):
        train(first)
    second = sft(directory, model, **options)
    train(second)
    return second


# Optimizers


def test_every_name_is_known():
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert set(get_args(ScheduleName)) == set(SCHEDULES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains(tmp_path: Path, model: Artifact, name: str):
    train(sft(tmp_path, model, optim=name))
    assert all(0 < change < 0.05 for change in moved(model, tmp_path).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_bit_equal(tmp_path: Path, model: Artifact, name: str):
    train(sft(tmp_path / "whole", model, optim=name))
    interrupted(tmp_path / "parts", model, 2, optim=name)
    assert same(tmp_path / "whole", tmp_path / "parts")


EXTRAS = {
    ("sgd", "momentum"): (0.9, {}),
    ("sgd", "nesterov"): (True, {"momentum": 0.9}),
    ("rmsprop", "alpha"): (0.5, {}),
    ("rmsprop", "eps"): (1e-2, {}),
    ("rmsprop", "momentum"): (0.5, {}),
    ("rmsprop", "centered"): (True, {}),
    ("adagrad", "lr_decay"): (1.0, {}),
    ("adagrad", "eps"): (1e-2, {}),
    ("ademamix", "beta3"): (0.9, {}),
    ("ademamix", "alpha"): (50.0, {}),
}


def test_every_detail_of_an_optimizer_is_covered():
    every = {(name, option) for name, about in OPTIMIZERS.items() for option in about.extra.model_fields}
    assert every - {("ademamix_8bit", "beta3"), ("ademamix_8bit", "alpha")} == set(EXTRAS)


@pytest.mark.parametrize("case", EXTRAS)
def test_a_detail_of_an_optimizer_changes_the_update(case: tuple[str, str]):
    (name, option), (value, base) = case, EXTRAS[case]
    ends = []
    for details in (base, {**base, option: value}):
        weight = torch.nn.Parameter(torch.ones(8))
        module = torch.nn.Module()
        module.register_parameter("weight", weight)
        config = SftOptions(optim=name, optim_args=details, learning_rate=1e-2)
        optimizer = groups.make_optimizer(module, config, _arguments(config), ["weight"])
        for scale in (1.0, 0.5, 2.0):
            weight.grad = torch.linspace(-1, 1, 8) * scale
            optimizer.step()
        ends.append(weight.detach().clone())
    assert not torch.equal(*ends)


def _arguments(config: SftOptions) -> Any:
    from posttrain_plugins.training.setting import arguments

    return arguments(config, 10, Path("unused"))


def test_eight_bit_moments_spare_embeddings_and_forget_earlier_trainings():
    config = SftOptions(optim="adamw_bnb_8bit", learning_rate=1e-2)
    for _ in range(2):
        llama = tiny_llama(300, hidden_size=64, tie_word_embeddings=False)
        plain = torch.nn.Linear(100, 100)
        optimizers = []
        for module in (llama, plain):
            optimizer = groups.make_optimizer(
                module, config, _arguments(config), [name for name, _ in module.named_parameters()]
            )
            for weight in module.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizers.append(optimizer)
        states = optimizers[0].state
        assert states[llama.model.embed_tokens.weight]["state1"].dtype == torch.float32
        assert states[llama.lm_head.weight]["state1"].dtype == torch.uint8
        assert optimizers[1].state[plain.weight]["state1"].dtype == torch.uint8


def test_a_missing_package_is_named(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(groups, "find_spec", lambda name: None)
    stage = catalogue().stage("train.sft")
    data = dataset_artifact(tmp_path / "rows", completion_rows(), "prompt_completion")
    inputs = {
        "model": [Input("base", Kind.MODEL, model.facts, model)],
        "data": [Input("rows", Kind.DATASET, data.facts, data)],
    }
    (finding,) = stage.check(configured(stage, optim="lion_8bit"), inputs)
    assert "optim `lion_8bit` needs bitsandbytes" in finding.message
    with pytest.raises(StageError, match="needs bitsandbytes") as caught:
        config = SftOptions(optim="lion_8bit")
        groups.make_optimizer(tiny_llama(30), config, _arguments(config), ())
    assert "posttrain[quant]" in str(caught.value.fix)


def test_weights_stay_float32_in_bfloat16_so_small_updates_count(tmp_path: Path, model: Artifact):
    # In bfloat16 nearly all of these updates would round away.
    options = {"max_steps": 50, "learning_rate": 1e-6, "bf16": True, "lr_scheduler_type": "constant"}
    train(sft(tmp_path, model, **options, logging_steps=50))
    start, end = weights(model.path), weights(tmp_path / "out-model")
    assert {tensor.dtype for tensor in end.values()} == {torch.float32}
    changed = sum(int((end[name] != start[name]).sum()) for name in start)
    assert changed > 0.9 * sum(tensor.numel() for tensor in start.values())


# Learning rates


def test_groups_are_the_general_rate_then_the_others_each_with_and_without_decay():
    llama = tiny_llama(30)
    names = [name for name, _ in llama.named_parameters()]
    decayed = [name for name in names if "norm" not in name]
    config = SftOptions(
        learning_rate=1e-3,
        weight_decay=0.1,
        learning_rate_groups={r"layers\.1\.": 2e-3, "embed_tokens": 3e-3},
    )
    made = groups.parameter_groups(llama, config, decayed)
    assert [(group["name"], group["lr"], group["weight_decay"]) for group in made] == [
        ("all, decay", 1e-3, 0.1),
        ("all, no decay", 1e-3, 0.0),
        (r"layers\.1\., decay", 2e-3, 0.1),
        (r"layers\.1\., no decay", 2e-3, 0.0),
        ("embed_tokens, decay", 3e-3, 0.1),
    ]
    found = {id(weight): group["name"] for group in made for weight in group["params"]}
    assert len(found) == len(names)
    by_name = {name: found[id(weight)] for name, weight in llama.named_parameters()}
    assert by_name["model.embed_tokens.weight"] == "embed_tokens, decay"
    assert by_name["model.layers.1.input_layernorm.weight"] == r"layers\.1\., no decay"
    assert by_name["model.layers.0.mlp.up_proj.weight"] == "all, decay"
    assert by_name["model.norm.weight"] == "all, no decay"


def test_a_group_learns_at_its_own_rate(tmp_path: Path, model: Artifact):
    options = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    options["learning_rate"] = 0.125
    train(sft(tmp_path / "plain", model, **options))
    train(sft(tmp_path / "groups", model, **options, learning_rate_groups={"layers.0.mlp": 0.5}))
    plain, grouped = moved(model, tmp_path / "plain"), moved(model, tmp_path / "groups")
    for name, change in plain.items():
        factor = 4 if "layers.0.mlp" in name else 1
        assert grouped[name] == pytest.approx(factor * change, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_every_parameter_in_groups_of_its_own_resumes_bit_equal(tmp_path: Path, model: Artifact, optim: str):
    options = {
        "optim": optim,
        "weight_decay": 0.1,
        "learning_rate_groups": {r"layers\.": 2e-3, r"embed_tokens|model\.norm": 3e-3},
        "lr_scheduler_type": "polynomial",
    }
    train(sft(tmp_path / "whole", model, **options))
    interrupted(tmp_path / "parts", model, 2, **options)
    assert same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("rates", "message", "found"),
    [
        ({"q_porj": 1e-4}, "for no parameter", "model.embed_tokens.weight"),
        ({"mlp": 1e-4, "up_proj": 1e-3}, "two learning rates", r"up_proj.weight"),
        ({"layers": 1e-4, r"mlp\.up": 1e-3}, "two learning rates", "by `layers` too"),
    ],
)
def test_rates_must_fit_the_parameters(rates: dict[str, float], message: str, found: str):
    with pytest.raises(StageError, match=message) as caught:
        groups.parameter_groups(tiny_llama(30), SftOptions(learning_rate_groups=rates), ())
    assert found in str(caught.value.found)
    assert "learning_rate_groups" in str(caught.value.where)


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
        _arguments(config)
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
