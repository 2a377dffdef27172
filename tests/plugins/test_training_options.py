"""Each option changes something or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.training import completion_rows, context_for, dataset_artifact, model_artifact, train, weights
from pydantic import ValidationError

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Level, VolatileMark
from posttrain.pipeline import Pipeline, Selection
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain_plugins.trainers.dpo import DpoOptions
from posttrain_plugins.trainers.sft import SftOptions
from posttrain_plugins.training.elsewhere import ELSEWHERE as BROUGHT
from posttrain_plugins.training.options import Lora, TrainingOptions

BASE: dict[str, Any] = {"max_steps": 3, "batch_size": 4, "learning_rate": 1e-2}
LONG = {**BASE, "max_length": 14}
LORA = {**BASE, "lora": {"r": 2}}
RISING = {"max_steps": 6, "batch_size": 4, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
EVALUATED = {**RISING, "eval_steps": 1}
BEST = {**EVALUATED, "load_best_model_at_end": True}

CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "learning_rate": (BASE, 2e-2),
    "batch_size": (BASE, 5),
    "num_train_epochs": ({"batch_size": 4, "num_train_epochs": 1.0}, 1.5),
    "max_steps": (BASE, 4),
    "learning_rate_groups": (BASE, {"mlp": 1e-3}),
    "lr_scheduler_type": (BASE, "cosine"),
    "lr_scheduler_kwargs": ({**BASE, "lr_scheduler_type": "cosine"}, {"num_cycles": 1}),
    "warmup_steps": (BASE, 1),
    "optim": (BASE, "sgd"),
    "optim_args": ({**BASE, "optim": "sgd"}, {"momentum": 0.9}),
    "weight_decay": (BASE, 0.5),
    "adam_beta1": (BASE, 0.5),
    "adam_beta2": (BASE, 0.9),
    "adam_epsilon": (BASE, 1.0),
    "max_grad_norm": ({**BASE, "adam_epsilon": 1e-2}, 0.01),
    "max_length": (BASE, 14),
    "truncation": (LONG, "keep_end"),
    "weight_column": (BASE, "weight"),
    "shuffle": (BASE, False),
    "seed": (BASE, 1),
    "bf16": (BASE, True),
    "fp16": (BASE, True),
    "lora": (BASE, {"r": 2}),
    "peft": (BASE, {"method": "ia3"}),
    "quantization": (LORA, {}),
}
ELSEWHERE = {
    "callbacks": "each callback has tests of its own",
    "unfreeze": "test_vision_training.py; it needs a model that sees",
}
EVALUATION_CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "eval_steps": (RISING, 2),
    "eval_on_start": (RISING, True),
    "metric_for_best_model": ({**BEST, "greater_is_better": False}, "eval/entropy"),
    "greater_is_better": (BEST, True),
    "load_best_model_at_end": (EVALUATED, True),
    "early_stopping_patience": (EVALUATED, 1),
    "early_stopping_threshold": ({**EVALUATED, "early_stopping_patience": 1}, 50.0),
}
LORA_CHANGES: dict[str, Any] = {
    "r": 3,
    "alpha": 4,
    "dropout": 0.5,
    "target_modules": ["q_proj"],
    "rslora": True,
    "dora": True,
    "exclude_modules": ["q_proj"],
    "modules_to_save": ["norm"],
    "layers_to_transform": [1],
    "init": "gaussian",
    "pissa_niter": 1,
    "bias": "all",
    "trainable_tokens": ["a"],
}
LORA_BASES: dict[str, dict[str, Any]] = {
    "layers_to_transform": {"target_modules": ["q_proj", "v_proj"]},
    "pissa_niter": {"init": "pissa"},
}
"""What an option of LoRA needs beside."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("biased"), attention_bias=True)


def trained(directory: Path, model: Artifact, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows = [{**row, "weight": 1 + i % 3} for i, row in enumerate(completion_rows())]
    train(context_for(directory, "train.sft", model, rows, "prompt_completion", **options))
    return weights(directory / "out-model")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, torch.Tensor]]:
    return {}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_changes_the_result(
    tmp_path: Path, model: Artifact, results: dict[str, dict[str, torch.Tensor]], name: str
):
    base, value = CHANGES[name]
    if repr(base) not in results:
        results[repr(base)] = trained(tmp_path / "base", model, base)
    assert not same(trained(tmp_path / "changed", model, {**base, name: value}), results[repr(base)])


@pytest.mark.parametrize("name", EVALUATION_CHANGES)
def test_an_option_of_evaluation_changes_what_is_put_out_or_shown(
    tmp_path: Path, model: Artifact, results: dict[str, Any], name: str
):
    base, value = EVALUATION_CHANGES[name]
    if f"eval {base!r}" not in results:
        results[f"eval {base!r}"] = evaluated(tmp_path / "base", model, base)
    (expected, shown), (found, seen) = (
        results[f"eval {base!r}"],
        evaluated(tmp_path / "changed", model, {**base, name: value}),
    )
    assert not same(found, expected) or seen != shown


def evaluated(directory: Path, model: Artifact, options: dict[str, Any]) -> tuple[Any, dict[int, float]]:
    """Train on one answer and evaluate on another: after some steps the loss of that one rises."""
    rows = [{"prompt": "q", "completion": "yes" + " yes" * n} for n in range(2)]
    context = context_for(directory, "train.sft", model, rows, "prompt_completion", **options)
    held_out = [{"prompt": "q", "completion": "yes no"}]
    data = dataset_artifact(directory / "held-out", held_out, "prompt_completion")
    context.inputs = {**context.inputs, "eval": [data]}
    train(context)
    seen = {
        step: values["eval/loss"] for step, values in context.seen_metrics.items() if "eval/loss" in values
    }
    return weights(directory / "out-model"), seen


@pytest.mark.parametrize("name", LORA_CHANGES)
def test_a_lora_option_changes_the_result(
    tmp_path: Path, biased: Artifact, results: dict[str, dict[str, torch.Tensor]], name: str
):
    base = {**LORA, "lora": {**LORA["lora"], **LORA_BASES.get(name, {})}}
    if repr(base) not in results:
        results[repr(base)] = trained(tmp_path / "base", biased, base)
    changed = {**base, "lora": {**base["lora"], name: LORA_CHANGES[name]}}
    assert not same(trained(tmp_path / "changed", biased, changed), results[repr(base)])


def volatile() -> set[str]:
    fields = TrainingOptions.model_fields.items()
    return {name for name, field in fields if any(isinstance(mark, VolatileMark) for mark in field.metadata)}


def test_every_option_is_covered_here():
    covered = [*CHANGES, *EVALUATION_CHANGES, *volatile(), *ELSEWHERE]
    assert sorted(covered) == sorted(TrainingOptions.model_fields)
    assert set(LORA_CHANGES) == set(Lora.model_fields)
    assert all(field.description for field in {**TrainingOptions.model_fields, **Lora.model_fields}.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logging_steps", 2),
        ("save_steps", 1),
        ("save_steps", 0),
        ("save_total_limit", 1),
        ("gradient_checkpointing", True),
    ],
)
def test_a_volatile_option_changes_no_bit(
    tmp_path: Path, model: Artifact, results: dict[str, dict[str, torch.Tensor]], name: str, value: Any
):
    if repr(BASE) not in results:
        results[repr(BASE)] = trained(tmp_path / "base", model, BASE)
    assert same(trained(tmp_path / "changed", model, {**BASE, name: value}), results[repr(BASE)])


def test_micro_batches_change_rounding_alone(tmp_path: Path, model: Artifact):
    start = weights(model.path)
    options = {**BASE, "optim": "sgd", "learning_rate": 0.3}
    whole = trained(tmp_path / "whole", model, options)
    cut = trained(tmp_path / "cut", model, {**options, "micro_batch_tokens": 30})
    largest = max(float((whole[name] - start[name]).abs().max()) for name in whole)
    gap = max(float((whole[name] - cut[name]).abs().max()) for name in whole)
    assert 0 < gap <= 2e-6 * largest + 1.2e-7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "trains nothing"),
        ({"max_steps": 5, "num_train_epochs": 2}, "ignored beside max_steps"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "ignored by `constant`"),
        ({"warmup_steps": 10.5}, "whole steps"),
        ({"lr_scheduler_type": "constant_with_warmup"}, "needs warmup_steps"),
        (
            {"optim": "sgd", "adam_beta1": 0.5, "adam_epsilon": 1e-6},
            "adam_beta1, adam_epsilon would be ignored",
        ),
        ({"learning_rate": 0}, "greater than 0"),
        ({"batch_size": 0}, "greater than or equal to 1"),
        ({"gradient_accumulation": 4}, "not permitted"),
        ({"lora": {"rank": 4}}, "not permitted"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        SftOptions(**options)


def test_dpo_refuses_adapter_dropout():
    with pytest.raises(ValidationError, match=r"lora\.dropout would be ignored"):
        DpoOptions(lora={"dropout": 0.1})


def test_a_validated_config_validates_again():
    config = SftOptions(max_steps=3, optim="sgd", lora={"r": 2})
    assert SftOptions(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "kept"),
    [("all-linear", "all-linear"), ("q_proj", ["q_proj"]), (["q_proj", "v_proj"], ["q_proj", "v_proj"])],
)
def test_one_target_module_is_a_list_of_one(given: Any, kept: Any):
    assert Lora(target_modules=given).target_modules == kept


def test_the_recipes_smoke_run_is_planned_without_a_warning(tmp_path: Path) -> None:
    for tiny in (False, True):
        plan = Pipeline.find("quickstart").plan(tmp_path / ".posttrain", selection=Selection(tiny=tiny))
        found = [finding for node in plan.nodes.values() for finding in node.findings]
        assert found and {finding.level for finding in found} == {Level.NOTE}
        assert plan.graph.nodes["sft"].config.batch_size == (8 if tiny else 64)


def test_what_people_bring_from_elsewhere_is_no_option_here():
    trainers = [catalogue().stage(name) for name in catalogue().names(Group.TRAINER)]
    assert not {name for each in trainers for name in each.config.model_fields} & set(BROUGHT)


@pytest.mark.parametrize("name", ["sync_ref_model", "per_device_train_batch_size", "simpo_gamma"])
def test_what_people_bring_from_elsewhere_is_told_what_takes_its_place(name: str):
    with pytest.raises(ConfigProblems) as error:
        validate_config(DpoOptions, {name: 1, "learning_rat": 2, "learning_rate": -1}, catalogue())
    found = {problem.path: problem.suggestion for problem in error.value.problems}
    assert found[name,] == BROUGHT[name]
    assert set(found) == {(name,), ("learning_rat",), ("learning_rate",)}, "each has a place of its own"
