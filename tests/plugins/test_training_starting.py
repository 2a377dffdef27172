"""The starting policy comes back exactly, in every set-up, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import ADAPTERS, Bench, advance, gap, logits, optimizer_of, trained_parameters
from helpers.training import model_artifact

from posttrain_plugins.models.policy import load_model
from posttrain_plugins.training.peft_options import Quantization
from posttrain_plugins.training.starting import StartingPolicy

SWITCHED_OFF = {
    "lora",
    "rslora",
    "gaussian",
    "whole head",
    "whole embeddings",
    "on the head",
    "one layer",
    "excluded",
    "tokens",
    "ia3",
    "loha",
    "lokr",
    "vera",
}
"""Set-ups in which the model without its adapter is the one it started as, bit by bit."""
SET_UPS = [*ADAPTERS, "full", "continued", "continued with a whole head", "4 bits", "8 bits"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("base"), attention_bias=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=64))


def continued(bench: Bench, directory: Path, name: str) -> Any:
    adapted = bench.fresh(ADAPTERS[name])
    advance(adapted.model, optimizer_of(adapted.model))
    return bench.opened(bench.saved(directory, adapted), trainable=True).model


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path, bench: Bench, wide: Bench) -> Any:
    match request.param:
        case "full":
            return load_model(bench.base.path, "float32").requires_grad_(True)
        case "continued":
            return continued(bench, tmp_path, "lora")
        case "continued with a whole head":
            return continued(bench, tmp_path, "whole head")
        case "4 bits":
            return wide.fresh(ADAPTERS["lora"], quantization=Quantization()).model
        case "8 bits":
            return wide.fresh(ADAPTERS["lora"], quantization=Quantization(bits=8)).model
        case name:
            return bench.fresh(ADAPTERS[name]).model


@pytest.mark.parametrize("model", SET_UPS, indirect=True)
def test_the_start_is_exact_before_and_after_training(model: Any):
    start = logits(model)
    starting = StartingPolicy.of(model, lambda: logits(model))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model)
    with starting.active():
        assert torch.equal(logits(model), start)
    advance(model, optimizer)
    end = logits(model)
    assert gap(start, end) > 1e-4
    kept = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    with starting.active():
        assert torch.equal(logits(model), start)
    assert torch.equal(logits(model), end)
    for name, parameter in model.named_parameters():
        before, value = kept[name]
        assert parameter is before and torch.equal(parameter, value), name
        assert parameter.requires_grad == flags[name], name


@pytest.mark.parametrize("model", sorted(SWITCHED_OFF), indirect=True)
def test_a_fresh_adapter_that_computes_nothing_costs_no_memory(model: Any):
    assert StartingPolicy.of(model, lambda: logits(model)).memory == 0


@pytest.mark.parametrize("model", ["pissa", "olora", "biases", "continued", "full"], indirect=True)
def test_elsewhere_the_trained_tensors_are_kept_and_nothing_else(model: Any):
    trained = sum(4 * parameter.numel() for parameter in trained_parameters(model).values())
    assert StartingPolicy.of(model, lambda: logits(model)).memory == trained


@pytest.mark.parametrize("model", ["lora", "pissa", "full", "4 bits"], indirect=True)
def test_training_goes_on_as_if_nobody_had_looked(model: Any):
    state = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model)
    advance(model, optimizer, 4)
    undisturbed = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    starting = StartingPolicy.of(model, lambda: logits(model))
    optimizer = optimizer_of(model)
    for _ in range(4):
        advance(model, optimizer, 1)
        with starting.active():
            logits(model)
    assert all(torch.equal(undisturbed[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("model", ["lora", "dora", "full"], indirect=True)
def test_looking_between_forward_and_backward_changes_no_gradient(model: Any):
    starting = StartingPolicy.of(model, lambda: logits(model))
    advance(model, optimizer_of(model), 1)

    def gradients(look: bool) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=torch.arange(4, 9)[None], use_cache=False).logits.float().pow(2).mean()
        if look:
            with starting.active():
                logits(model)
        loss.backward()
        return [parameter.grad.clone() for parameter in trained_parameters(model).values()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_dropout_is_off_meanwhile_and_the_mode_comes_back(bench: Bench):
    adapted = bench.fresh({"lora": {"r": 2, "dropout": 0.5}}).model
    start = logits(adapted)
    starting = StartingPolicy.of(adapted, lambda: logits(adapted))
    adapted.train()
    with starting.active():
        assert not adapted.training and not torch.is_grad_enabled()
        assert torch.equal(
            adapted(input_ids=torch.arange(4, 9)[None]).logits,
            adapted(input_ids=torch.arange(4, 9)[None]).logits,
        )
        assert torch.equal(logits(adapted), start)
    assert adapted.training and torch.is_grad_enabled()
