from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stepping import examples, stepper
from helpers.training import completion_rows, context_for, model_artifact, preference_rows, train, weights

from posttrain.artifacts.manifest import Artifact
from posttrain.errors import StageError
from posttrain_plugins.backends.single import Single
from posttrain_plugins.training import assembly, memory, way
from posttrain_plugins.training.arrangement import FILE, Arrangement, earlier
from posttrain_plugins.training.batches import Budget
from posttrain_plugins.training.head import KeepHead
from posttrain_plugins.training.memory import bytes_per_token, measured_tokens, recomputing, saved_bytes
from posttrain_plugins.training.step import Stepper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def run(directory: Path, model: Artifact, **options: Any) -> dict[str, Any]:
    context = context_for(
        directory, "train.sft", model, completion_rows(12), "prompt_completion", **{"max_steps": 2, **options}
    )
    train(context)
    return json.loads((context.work / FILE).read_text()) | {"notes": context.notes}


def test_what_was_asked_for_decides_whether_an_earlier_arrangement_holds(tmp_path: Path):
    made = Arrangement(512, None, "packed", 1 << 20, 2, {"micro_batch_tokens": 512})
    assert earlier(tmp_path, made.asked, Single()) is None
    made.write(tmp_path)
    assert earlier(tmp_path, made.asked, Single()) == made
    assert earlier(tmp_path, {"micro_batch_tokens": 256}, Single()) is None


def test_a_rank_that_is_late_finds_what_rank_0_found(tmp_path: Path):
    """Rank 0 has written what it chose before the other looks."""
    made = Arrangement(512, None, "packed", 1 << 20, 2, {})

    class Late(Single):
        def agree(self, value: Any) -> Any:
            return None

    made.write(tmp_path)
    late = Late()
    late.rank = 1
    assert earlier(tmp_path, {}, late) is None


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_it_is_told_and_kept_before_the_first_step(tmp_path: Path, model: Artifact, layout: str):
    kept = run(tmp_path, model, layout=layout, micro_batch_tokens=300)
    assert (kept["tokens"], kept["layout"], kept["threads"]) == (300, layout, torch.get_num_threads())
    name = layout.replace("_", " ")
    assert any(f"at most 300 tokens, {name} rows" in note for note in kept["notes"])


def test_the_reference_computes_a_prompt_once_for_both_answers(tmp_path: Path, model: Artifact):
    """KTO learns one answer and measures another; a pass over the reference scores both."""
    rows = [
        {"prompt": row["prompt"] * 8, "completion": row["completion"], "label": number % 2 == 0}
        for number, row in enumerate(completion_rows(8))
    ]
    found = {}
    for loss in ("kto", "apo_zero_unpaired"):
        context = context_for(
            tmp_path / loss, "train.kto", model, rows, "unpaired_preference", loss=loss, max_steps=1
        )
        train(context)
        found[loss] = json.loads((context.work / FILE).read_text())["layout"]
    assert found["kto"] == "shared_prefix" != found["apo_zero_unpaired"]


def test_another_layout_and_budget_train_the_same(tmp_path: Path, model: Artifact):
    """SGD, so that an update is as large as its gradient."""
    results = []
    for number, layout in enumerate(["padded", "packed", "shared_prefix"]):
        context = context_for(
            tmp_path / str(number),
            "train.dpo",
            model,
            preference_rows(8),
            "preference",
            **{"max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0, "layout": layout},
            micro_batch_tokens=100 + 200 * number,
        )
        train(context)
        results.append(weights(context.result("model").path))
    start = weights(model.path)
    largest = max(float((results[0][name] - start[name]).abs().max()) for name in start)
    ulp = torch.finfo(torch.float32).eps
    for other in results[1:]:
        for name, value in other.items():
            gap = float((value - results[0][name]).abs().max())
            assert gap <= 2e-6 * largest + ulp * float(value.abs().max())


def test_a_resume_goes_on_as_before(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch):
    rows, options = completion_rows(12), {"max_steps": 4, "save_steps": 1, "batch_size": 3}
    first = context_for(tmp_path, "train.sft", model, rows, "prompt_completion", **options)
    first.stop_at = 2
    with pytest.raises(Exception, match="asked to stop"):
        train(first)
    made = Arrangement(**json.loads((first.work / FILE).read_text()))
    other = replace(made.within(made.budget.half), threads=made.threads + 1, kept=1000)
    other.write(first.work)
    before, used = torch.get_num_threads(), []
    plain = Stepper.backward

    def backward(self: Stepper, examples: Any) -> Any:
        used.append((torch.get_num_threads(), self.head.memory))
        return plain(self, examples)

    monkeypatch.setattr(Stepper, "backward", backward)
    second = context_for(tmp_path, "train.sft", model, rows, "prompt_completion", **options)
    train(second)
    assert any(f"at most {made.tokens // 2} tokens" in note and "as before" in note for note in second.notes)
    assert set(used) == {(other.threads, 1000)} and torch.get_num_threads() == before


def test_when_memory_runs_out_half_the_budget_is_kept_for_a_resume(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    plain, failed = Stepper.score, []

    def score(self: Stepper, micro: Any) -> Any:
        if torch.is_grad_enabled() and not failed:
            failed.append(micro.tokens.numel())
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, micro)

    monkeypatch.setattr(Stepper, "score", score)
    kept = run(tmp_path, model, micro_batch_tokens=4096)
    assert kept["tokens"] == failed[0] // 2
    assert any("memory ran out" in note and f"most {failed[0] // 2} tokens" in note for note in kept["notes"])


def test_the_bound_on_supervised_tokens_is_halved_for_a_resume_too(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    """With a head that bounds no logits itself, half of the other bound alone would change nothing."""
    plain, budgets = Stepper._step, []

    def step(self: Stepper, examples: Any, learn: bool) -> Any:
        budgets.append(self.budget)
        if len(budgets) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, examples, learn)

    monkeypatch.setattr(Stepper, "_step", step)
    monkeypatch.setattr(way, "choose_head", lambda *_: (KeepHead(), None))
    monkeypatch.setattr(assembly, "budget_of", lambda model, head, tokens: Budget(tokens, 64))
    kept = run(tmp_path, model, micro_batch_tokens=4096)
    half = Budget(kept["tokens"], 32)
    assert kept["supervised"] == 32 and half.tokens < 4096
    shutil.rmtree(tmp_path / "work" / "checkpoints", ignore_errors=True)
    run(tmp_path, model, micro_batch_tokens=4096)
    assert budgets[1:] == [half] * 4


def test_ranks_that_chose_otherwise_are_stopped(tmp_path: Path):
    class Other(Single):
        def agree(self, value: Any) -> Any:
            return ["AnalyticHead", "packed"]

    with pytest.raises(StageError, match="ranks do not agree"):
        assembly._require_same(Other(), "AnalyticHead", "padded")
    assembly._require_same(Other(), "AnalyticHead", "packed")


def test_what_a_forward_pass_keeps_worked_out_by_hand():
    """y = exp(Wx) keeps x [5, 3] for the gradient of W and the result [5, 7]; W itself is the model's."""
    layer = torch.nn.Linear(3, 7, bias=False)
    given = torch.randn(5, 3)
    assert saved_bytes(lambda: layer(given).exp(), layer) == 4 * (5 * 3 + 5 * 7)


def test_measuring_moves_neither_weights_nor_generators():
    made = stepper("train.sft", "nll", attention_dropout=0.2)
    before = [tensor.clone() for tensor in made.model.parameters()]
    state = torch.get_rng_state()
    assert bytes_per_token(made, examples("train.sft", 30)) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), before, strict=True))
    assert all(tensor.grad is None for tensor in made.model.parameters())


def test_a_measured_budget_fits_into_what_is_free(monkeypatch: pytest.MonkeyPatch):
    made, rows = stepper("train.sft", "nll", layout="packed"), examples("train.sft", 30)
    each = bytes_per_token(made, rows)
    monkeypatch.setattr(memory, "free", lambda device: int(1000 * each / memory.SHARE))
    assert measured_tokens(made, each, reserved=0, largest=1 << 20) == 512
    assert measured_tokens(made, each, reserved=0, largest=300) == 512
    assert measured_tokens(made, each, reserved=0, largest=100) == 128
    assert measured_tokens(made, each, reserved=0, largest=900) == 512, "no more than fits"
    made.parallel.size = 2
    assert measured_tokens(made, each, reserved=0, largest=1 << 20) == 256


def test_recomputed_activations_are_not_counted_but_for_a_layer():
    made, rows = stepper("train.sft", "nll", layout="packed"), examples("train.sft", 30)
    made.model.eval()
    plain = bytes_per_token(made, rows)
    taken = recomputing(made, rows, plain)
    layers = made.model.config.num_hidden_layers
    assert plain / layers < taken < plain
    assert not made.model.training


def test_too_little_memory_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free", lambda device: 1 << 10)
    with pytest.raises(StageError, match="too little free memory"):
        measured_tokens(stepper("train.sft", "nll"), 100.0, reserved=0, largest=1000)


def test_auto_trains(tmp_path: Path, model: Artifact):
    kept = run(tmp_path, model, micro_batch_tokens="auto")
    assert kept["tokens"] & (kept["tokens"] - 1) == 0
    assert kept["asked"]["micro_batch_tokens"] == "auto"


def test_free_memory_is_bounded_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = tmp_path / "max", tmp_path / "current", tmp_path / "stat"
    files[0].write_text("5000\n")
    files[1].write_text("1000\n")
    files[2].write_text("anon 500\nactive_file 100\ninactive_file 300\n")
    monkeypatch.setattr(memory, "_CGROUP", files)
    assert memory.free(torch.device("cpu")) == 4300
    files[0].write_text("max\n")
    assert memory.free(torch.device("cpu")) > 4000
