"""A training that was stopped or killed ends with the bytes of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import (
    ROWS,
    TRAININGS,
    Context,
    completion_rows,
    context_for,
    default_loss,
    format_of,
    model_artifact,
    preference_rows,
    train,
    weights,
)

from posttrain.artifacts.manifest import Artifact
from posttrain.errors import Interrupted
from posttrain_plugins.training import checkpoints
from posttrain_plugins.training.step import Stepper

pytestmark = pytest.mark.slow

SFT = {
    "num_train_epochs": 3.0,
    "batch_size": 4,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
}
STEPS = 9
"""Ten rows in steps of four: three steps an epoch, the last one ragged."""


class Killed(BaseException):
    """What SIGKILL would do: nothing of the stage runs afterwards."""


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    return model_artifact(tmp_path / "model", attention_dropout=0.2)


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []
    plain = Stepper.backward

    def spy(self: Stepper, examples: Any) -> Any:
        seen.append([example.row for example in examples])
        return plain(self, examples)

    monkeypatch.setattr(Stepper, "backward", spy)
    return seen


def sft(directory: Path, model: Artifact, **options: Any) -> Context:
    return context_for(
        directory, "train.sft", model, completion_rows(), "prompt_completion", **{**SFT, **options}
    )


def dpo(directory: Path, model: Artifact, **options: Any) -> Context:
    chosen = {"num_train_epochs": 3.0, "batch_size": 2, **options}
    return context_for(directory, "train.dpo", model, preference_rows(), "preference", **chosen)


def assert_same_output(one: Path, other: Path) -> None:
    a, b = weights(one / "out-model"), weights(other / "out-model")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def kill_at(step: int) -> Callable[[int, str], None]:
    def kill(done: int, unit: str) -> None:
        if unit == "steps" and done == step:
            raise Killed

    return kill


@pytest.mark.parametrize("make", [sft, dpo])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stopped_and_resumed_is_bit_equal(
    tmp_path: Path, model: Artifact, rows_seen: list[list[int]], make: Any, stop: int
):
    whole = make(tmp_path / "whole", model)
    expected = train(whole)
    expected_rows = list(rows_seen)
    rows_seen.clear()

    first = make(tmp_path / "parts", model)
    first.stop_at = stop
    with pytest.raises(Interrupted, match=f"step {stop} of {STEPS}"):
        train(first)
    second = make(tmp_path / "parts", model)
    found = train(second)

    assert_same_output(tmp_path / "parts", tmp_path / "whole")
    assert rows_seen == expected_rows
    assert first.losses + second.losses == whole.losses
    assert (found.figures, found.steps) == (expected.figures, expected.steps) and found.steps == STEPS
    assert f"going on from step {stop} of {STEPS}" in second.notes


def test_epochs_have_different_orders(tmp_path: Path, model: Artifact, rows_seen: list[list[int]]):
    train(sft(tmp_path, model))
    epochs = [list(chain.from_iterable(rows_seen[i : i + 3])) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("make", [sft, dpo])
def test_killed_between_checkpoints_is_bit_equal(tmp_path: Path, model: Artifact, make: Any):
    train(make(tmp_path / "whole", model))
    killed = make(tmp_path / "parts", model, save_steps=4)
    killed.on_progress = kill_at(6)
    with pytest.raises(Killed):
        train(killed)
    again = make(tmp_path / "parts", model, save_steps=4)
    train(again)
    assert f"going on from step 4 of {STEPS}" in again.notes
    assert_same_output(tmp_path / "parts", tmp_path / "whole")


def test_killed_after_the_last_step_goes_straight_to_saving(
    tmp_path: Path, model: Artifact, rows_seen: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    expected = train(sft(tmp_path / "whole", model))

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("posttrain_plugins.training.stage.save_policy", die)
        with pytest.raises(Killed):
            train(sft(tmp_path / "parts", model))
    rows_seen.clear()
    found = train(sft(tmp_path / "parts", model))
    assert rows_seen == []
    assert (found.steps, found.figures) == (STEPS, expected.figures)
    assert_same_output(tmp_path / "parts", tmp_path / "whole")


def test_a_damaged_newest_checkpoint_is_skipped_said_and_made_up_for(tmp_path: Path, model: Artifact):
    train(sft(tmp_path / "whole", model))
    killed = sft(tmp_path / "parts", model, save_steps=2)
    killed.on_progress = kill_at(7)
    with pytest.raises(Killed):
        train(killed)
    damaged = tmp_path / "parts/work/checkpoints/step-00000006/weights.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    again = sft(tmp_path / "parts", model, save_steps=2)
    train(again)
    skipped, going = again.notes[-2:]
    assert "step-00000006 is skipped: weights.safetensors: expected sha256" in skipped
    assert going == f"going on from step 4 of {STEPS}"
    assert_same_output(tmp_path / "parts", tmp_path / "whole")


VARIANTS = {
    "plain": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "adapter": {"lora": {"r": 2}},
}


@pytest.mark.parametrize(
    ("uses", "loss", "variant"),
    [
        (uses, loss, variant)
        for uses, loss in TRAININGS
        for variant in VARIANTS
        if variant == "plain" or loss == default_loss(uses)
    ],
)
def test_every_trainer_resumes_bit_equal_in_every_mode(
    tmp_path: Path, model: Artifact, uses: str, loss: str, variant: str
):
    rows = ROWS[format_of(uses)](6)

    def make(directory: Path) -> Context:
        options = {"max_steps": 5, "batch_size": 2, "loss": loss, **VARIANTS[variant]}
        return context_for(directory, uses, model, rows, format_of(uses), **options)

    whole = make(tmp_path / "whole")
    expected = train(whole)
    first = make(tmp_path / "parts")
    first.stop_at = 2
    with pytest.raises(Interrupted):
        train(first)
    second = make(tmp_path / "parts")
    found = train(second)
    assert_same_output(tmp_path / "parts", tmp_path / "whole")
    assert first.losses + second.losses == whole.losses
    assert found.figures == expected.figures


def test_an_adapter_resumes_with_its_dropout(tmp_path: Path, model: Artifact):
    lora = {"r": 2, "dropout": 0.1}
    train(sft(tmp_path / "whole", model, lora=lora))
    first = sft(tmp_path / "parts", model, lora=lora)
    first.stop_at = 4
    with pytest.raises(Interrupted):
        train(first)
    train(sft(tmp_path / "parts", model, lora=lora))
    assert_same_output(tmp_path / "parts", tmp_path / "whole")


def test_resuming_reads_the_optimizers_state_once(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    first = sft(tmp_path, model)
    first.stop_at = 4
    with pytest.raises(Interrupted):
        train(first)
    read: list[str] = []
    plain = checkpoints._tensors
    monkeypatch.setattr(checkpoints, "_tensors", lambda path: (read.append(path.stem), plain(path))[1])
    train(sft(tmp_path, model))
    assert (read.count("state"), read.count("weights")) == (1, 1)


def test_the_reference_is_kept_and_a_damaged_one_is_computed_again(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    train(dpo(tmp_path / "whole", model))
    for harm in (None, "log_probs.safetensors"):
        parts = tmp_path / f"parts-{harm}"
        first = dpo(parts, model)
        first.stop_at = 4
        with pytest.raises(Interrupted):
            train(first)
        if harm is not None:
            (parts / "work/reference" / harm).write_bytes(b"")
        second = dpo(parts, model)
        train(second)
        computed = any(unit == "reference rows" for _, _, unit in second.seen_progress)
        assert computed is (harm is not None)
        assert_same_output(parts, tmp_path / "whole")


def test_the_caller_keeps_its_settings(tmp_path: Path, model: Artifact):
    before = torch.are_deterministic_algorithms_enabled()
    train(sft(tmp_path, model))
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_resume_with_another_budget_and_layout_ends_at_the_same_weights(tmp_path: Path, make: Any):
    """Without dropout the cut changes rounding alone."""
    plain = model_artifact(tmp_path / "plain")
    options = {"optim": "sgd", "learning_rate": 0.3, "layout": "padded", "micro_batch_tokens": 4096}
    train(make(tmp_path / "whole", plain, **options))
    first = make(tmp_path / "parts", plain, **options)
    first.stop_at = 4
    with pytest.raises(Interrupted):
        train(first)
    train(make(tmp_path / "parts", plain, **{**options, "layout": "packed", "micro_batch_tokens": 16}))
    start, a, b = (
        weights(plain.path),
        *(weights(tmp_path / each / "out-model") for each in ("whole", "parts")),
    )
    largest = max(float((a[name] - start[name]).abs().max()) for name in a)
    ulp = torch.finfo(torch.float32).eps
    for name, value in a.items():
        assert float((value - b[name]).abs().max()) <= 2e-6 * largest + ulp * float(value.abs().max())
