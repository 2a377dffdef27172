"""Optimizers and learning rates by group: each does what its name says, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.models import tiny_llama
from helpers.optimizing import arguments_of, same, sft
from helpers.training import (
    Context,
    completion_rows,
    dataset_artifact,
    model_artifact,
    train,
    weights,
)

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training import groups
from posttrain_plugins.training.optimizers import OPTIMIZERS, OptimizerName
from posttrain_plugins.training.schedules import SCHEDULES, ScheduleName


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    # Wide enough for 8-bit moments, which small tensors do not get.
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def moved(model: Artifact, directory: Path) -> dict[str, float]:
    """The largest change of each tensor."""
    start, end = weights(model.path), weights(directory / "out-model")
    return {name: float((end[name] - start[name]).abs().max()) for name in start}


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
        optimizer = groups.make_optimizer(module, config, arguments_of(config), ["weight"])
        for scale in (1.0, 0.5, 2.0):
            weight.grad = torch.linspace(-1, 1, 8) * scale
            optimizer.step()
        ends.append(weight.detach().clone())
    assert not torch.equal(*ends)


def test_eight_bit_moments_spare_embeddings_and_forget_earlier_trainings():
    config = SftOptions(optim="adamw_bnb_8bit", learning_rate=1e-2)
    for _ in range(2):
        llama = tiny_llama(300, hidden_size=64, tie_word_embeddings=False)
        plain = torch.nn.Linear(100, 100)
        optimizers = []
        for module in (llama, plain):
            optimizer = groups.make_optimizer(
                module, config, arguments_of(config), [name for name, _ in module.named_parameters()]
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
        groups.make_optimizer(tiny_llama(30), config, arguments_of(config), ())
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
