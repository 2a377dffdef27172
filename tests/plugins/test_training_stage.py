from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import completion_rows, context_for, model_artifact, preference_rows, train, weights
from safetensors.torch import load_file, save_file

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Certainty, Input, Level
from posttrain.errors import DataError, StageError, TrainingDiverged
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain.registry.discovery import discover
from posttrain_plugins.losses.token.nll import Nll
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.trainers.dpo import Dpo, DpoOptions
from posttrain_plugins.trainers.sft import Sft, SftOptions
from posttrain_plugins.training import loop
from posttrain_plugins.training import stage as stage_module
from posttrain_plugins.training.options import TOKENS
from posttrain_plugins.training.randomness import random_state
from posttrain_plugins.training.setting import without_dropout

pytestmark = pytest.mark.slow

LN2 = math.log(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), attention_dropout=0.3)


def sft(directory: Path, model: Artifact, rows: Any = None, **options: Any) -> FakeContext:
    return context_for(
        directory,
        "train.sft",
        model,
        rows or completion_rows(),
        "prompt_completion",
        **{"max_steps": 3, **options},
    )


def dpo(directory: Path, model: Artifact, **options: Any) -> FakeContext:
    chosen = {"max_steps": 3, "batch_size": 4, **options}
    return context_for(directory, "train.dpo", model, preference_rows(), "preference", **chosen)


def undropped(model: Artifact) -> Artifact:
    """The same model without dropout in its config."""
    file = model.path / "config.json"
    directory = model.path.with_name("undropped")
    if not directory.exists():
        shutil.copytree(model.path, directory)
        config = json.loads(file.read_text())
        (directory / file.name).write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return as_artifact(directory, model.facts)


def test_the_overridden_methods_are_frozen():
    own = {name for name, value in vars(loop.Loop).items() if callable(value)}
    assert {name for name in own if hasattr(transformers.Trainer, name)} == set(loop.OVERRIDDEN)


def test_sft_learns_and_puts_out_a_complete_model(tmp_path: Path, model: Artifact):
    context = sft(tmp_path, model, max_steps=30)
    outcome = train(context)
    assert context.losses[-1] < 0.8 * context.losses[0]
    assert outcome.steps == 30
    assert outcome.figures["loss"] == pytest.approx(sum(context.losses[-10:]) / 10)
    kind, facts = context.described["model"]
    assert kind is Kind.MODEL
    assert facts == model.facts
    saved = {path.name for path in (tmp_path / "out-model").iterdir()}
    assert saved == {path.name for path in model.path.iterdir()}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((tmp_path / "out-model" / name).read_text()) == json.loads(
            (model.path / name).read_text()
        )


def test_the_first_loss_is_the_plain_mean_over_completion_tokens(tmp_path: Path, model: Artifact):
    plain = open_policy(model, SimpleNamespace())
    total, count = 0.0, 0
    for row in completion_rows():
        encoded = plain.encoder.encode_pair(row["prompt"], row["completion"])
        with torch.no_grad():
            logp = plain.model(torch.tensor([encoded.tokens])).logits[0].log_softmax(-1)
        for i in range(len(row["prompt"]), len(encoded.tokens)):
            total, count = total - float(logp[i - 1, encoded.tokens[i]]), count + 1
    context = sft(tmp_path, undropped(model), batch_size=10)
    train(context)
    assert context.losses[0] == pytest.approx(total / count, rel=1e-6)


def test_sft_trains_with_the_models_dropout(tmp_path: Path, model: Artifact):
    with_dropout, without = sft(tmp_path / "with", model), sft(tmp_path / "without", undropped(model))
    train(with_dropout)
    train(without)
    assert with_dropout.losses[0] != without.losses[0]


def test_the_metrics_of_a_step(tmp_path: Path, model: Artifact):
    context = sft(tmp_path, model, logging_steps=2)
    train(context)
    assert sorted(context.seen_metrics) == [2, 3]
    names = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "entropy", "token_accuracy"}
    assert set(context.seen_metrics[2]) == names
    assert [entry for entry in context.seen_progress] == [(step, 3, "steps") for step in (1, 2, 3)]


@pytest.mark.parametrize("budget", [1, 40, 10_000])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_dpo_starts_at_ln_2(tmp_path: Path, model: Artifact, budget: int, lora: Any):
    context = dpo(tmp_path, model, micro_batch_tokens=budget, lora=lora)
    train(context)
    assert context.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert context.seen_metrics[1]["rewards/margin"] == pytest.approx(0, abs=1e-5)
    assert context.losses[-1] < LN2 - 1e-3


def test_dpo_in_bfloat16_starts_near_ln_2(tmp_path: Path, model: Artifact):
    context = dpo(tmp_path, model, bf16=True, micro_batch_tokens=60)
    train(context)
    assert context.losses[0] == pytest.approx(LN2, abs=2e-2)
    assert context.warnings == []


def test_dpo_on_a_continued_adapter_starts_at_ln_2(tmp_path: Path, model: Artifact):
    first = sft(tmp_path / "first", model, lora={"r": 2}, max_steps=20)
    train(first)
    kind, facts = first.described["model"]
    adapter = as_artifact(tmp_path / "first/out-model", facts, kind)
    assert (kind, facts.base) == (Kind.ADAPTER, model.digest)

    second = dpo(tmp_path / "second", adapter)
    second.known[model.digest] = model
    train(second)
    assert second.losses[0] == pytest.approx(LN2, abs=1e-6)
    kind, facts = second.described["model"]
    assert (kind, facts.base) == (Kind.ADAPTER, model.digest)
    before, after = weights(adapter.path), weights(tmp_path / "second/out-model")
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_an_adapter_opens_again_with_what_it_learned(tmp_path: Path, model: Artifact):
    context = sft(tmp_path, model, lora={"r": 2}, max_steps=20)
    train(context)
    kind, facts = context.described["model"]
    context.known[model.digest] = model
    policy = open_policy(as_artifact(tmp_path / "out-model", facts, kind), context)
    plain = open_policy(model, context)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert (policy.model(tokens).logits - plain.model(tokens).logits).abs().max() > 1e-2


def test_the_learning_rate_follows_its_schedule(tmp_path: Path, model: Artifact):
    context = sft(tmp_path, model, max_steps=4, warmup_steps=2, learning_rate=0.1)
    train(context)
    rates = [values["learning_rate"] for _, values in sorted(context.seen_metrics.items())]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.05])


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.07, 7), (0.14, 14), (0.29, 29), (0.295, 30), (2.0, 200), (1e-9, 1)]
)
def test_epochs_that_are_fractions_take_no_step_for_a_rounding_error(epochs: float, steps: int):
    assert stage_module._steps(SftOptions(num_train_epochs=epochs), 100) == steps


def test_active_dropout_is_said_to_depend_on_the_cut(tmp_path: Path, model: Artifact):
    told = sft(tmp_path / "with", model)
    train(told)
    assert [note for note in told.notes if "masks depend on micro_batch_tokens" in note]
    for silent in (sft(tmp_path / "without", undropped(model)), dpo(tmp_path / "dpo", model)):
        train(silent)
        assert not [note for note in silent.notes if "masks depend" in note] and silent.warnings == []


def test_a_model_that_is_much_worse_than_guessing_is_refused(tmp_path: Path, model: Artifact):
    damaged = model_artifact(tmp_path / "damaged", tie_word_embeddings=False)
    file = damaged.path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StageError, match="guessing") as caught:
        train(sft(tmp_path, damaged))
    assert caught.value.where == "step 0" and "tokenizer" in caught.value.found


def test_the_gap_to_the_reference_is_reported_once_and_is_no_final_figure(tmp_path: Path, model: Artifact):
    context = dpo(tmp_path, model)
    outcome = train(context)
    assert [step for step, values in context.seen_metrics.items() if "reference/gap" in values] == [1]
    assert "reference/gap" not in outcome.figures


def test_the_callers_random_generators_go_on_where_they_were(tmp_path: Path, model: Artifact):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = random_state()
    train(sft(tmp_path, model))
    after = random_state()
    assert torch.equal(after.pop("torch"), before.pop("torch"))
    assert after == before


def test_epochs_count_the_ragged_last_step(tmp_path: Path, model: Artifact):
    outcome = train(sft(tmp_path, model, max_steps=-1, num_train_epochs=1.5, batch_size=4))
    assert outcome.steps == 5


class Poison(Nll):
    """Not a number from the third step on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        self.calls += 1
        output = super().__call__(batch, config, stats, state)
        if self.calls < 3:
            return output
        return type(output)([type(term)(term.values * math.nan, term.reduction) for term in output.terms])


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path, model: Artifact):
    context = sft(tmp_path, model, save_steps=1, max_steps=5, shuffle=False, batch_size=2)
    context.components["nll"] = Poison
    with pytest.raises(TrainingDiverged, match="the loss is not finite") as caught:
        train(context)
    assert caught.value.where == "step 3"
    assert "rows 4, 5" in caught.value.found
    kept = sorted(path.name for path in (tmp_path / "work/checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000002"]
    assert f"the last checkpoint, of step 2, is kept in {tmp_path / 'work/checkpoints'}" in caught.value.fix
    assert not (tmp_path / "out-model").exists()
    early = sft(tmp_path / "early", model, save_steps=0, max_steps=5)
    early.components["nll"] = Poison
    with pytest.raises(TrainingDiverged) as caught:
        train(early)
    assert "there is no checkpoint to go back to" in caught.value.fix


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path: Path, model: Artifact):
    class Cliff(Nll):
        def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
            output = super().__call__(batch, config, stats, state)
            values = output.terms[0].values
            steep = values + (values - values.detach()).abs().sqrt()
            return type(output)([type(output.terms[0])(steep, output.terms[0].reduction)])

    for number, clip in enumerate((1.0, 0.0)):
        context = sft(tmp_path / str(number), model, max_grad_norm=clip)
        context.components["nll"] = Cliff
        with pytest.raises(TrainingDiverged, match="norm of the gradient"):
            train(context)


def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    context = sft(tmp_path, model, save_steps=1)

    def spoil(done: int, unit: str) -> None:
        if done == 2:
            with torch.no_grad():
                loops[-1].model.lm_head.weight[3, 1] = math.inf

    loops: list[Any] = []
    plain = loop.Loop.__init__
    monkeypatch.setattr(
        loop.Loop, "__init__", lambda self, *args, **more: (loops.append(self), plain(self, *args, **more))[1]
    )
    context.on_progress = spoil
    with pytest.raises(TrainingDiverged, match="a weight is not finite"):
        train(context)
    assert [path.name for path in (tmp_path / "work/checkpoints").iterdir()] == ["step-00000001"]


def test_a_policy_unlike_its_reference_is_refused_with_the_likely_cause(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Dpo, "dropout", True)
    with pytest.raises(StageError, match="dropout") as caught:
        train(dpo(tmp_path, model))
    assert caught.value.where == "step 0"


def test_dropout_is_off_in_modules_attributes_and_config_and_comes_back(model: Artifact):
    inner = open_policy(model, SimpleNamespace()).model
    inner.extra = torch.nn.Dropout(0.4)
    attention = inner.model.layers[0].self_attn
    with without_dropout(inner):
        assert (inner.extra.p, attention.attention_dropout, inner.config.attention_dropout) == (0, 0, 0)
    assert (inner.extra.p, attention.attention_dropout, inner.config.attention_dropout) == (0.4, 0.3, 0.3)


def test_dropped_rows_are_noted_and_figured(tmp_path: Path, model: Artifact):
    rows = [*completion_rows(4), {"prompt": "p" * 40, "completion": "never seen"}]
    context = sft(tmp_path, model, rows, max_length=30)
    outcome = train(context)
    assert context.notes[0] == (
        "1 row(s) dropped: truncation to 30 tokens removes every supervised token (row 5)"
    )
    assert (outcome.figures["rows"], outcome.figures["rows_dropped"]) == (4.0, 1.0)


def test_the_models_context_is_the_longest_length(tmp_path: Path, model: Artifact):
    rows = [*completion_rows(3), {"prompt": "p", "completion": "x" * 300}]
    context = sft(tmp_path, model, rows)
    assert train(context).figures["rows_truncated"] == 1.0


def test_no_usable_row_is_an_error(tmp_path: Path, model: Artifact):
    with pytest.raises(DataError, match="no row of the dataset"):
        train(sft(tmp_path, model, [{"prompt": "p" * 40, "completion": "a"}], max_length=30))


def test_a_loss_of_another_family_is_refused():
    with pytest.raises(ConfigProblems) as caught:
        validate_config(SftOptions, {"loss": "sigmoid"}, discover())
    (problem,) = caught.value.problems
    assert problem.path == ("loss",) and "does not fit here" in problem.message
    assert problem.found == "family preference, not token"
    assert "nll" in (problem.expected or "") and "`train.dpo`" in (problem.suggestion or "")


def test_adapters_that_fit_no_module_are_refused(tmp_path: Path, model: Artifact):
    with pytest.raises(StageError, match="does not fit the model"):
        train(sft(tmp_path, model, lora={"target_modules": ["no_such_proj"]}))


@pytest.mark.parametrize("format", ["messages", "text"])
def test_sft_takes_other_formats(tmp_path: Path, model: Artifact, format: str):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]
    rows = [{"messages": messages}] if format == "messages" else [{"text": "once upon a time"}]
    context = context_for(tmp_path, "train.sft", model, rows, format, max_steps=8)
    train(context)
    assert context.losses[-1] < context.losses[0]


def given(kind: Kind = Kind.MODEL, format: str = "prompt_completion", **facts: Any) -> dict[str, list[Input]]:
    known = {
        "context": 128,
        "parameters": 1000,
        "layers": 2,
        "width": 16,
        "embeddings": 80,
        "has_template": True,
    }
    policy = Input("base.model", kind, PolicyFacts(**{**known, "dtype": "bfloat16", **facts}))
    data = Input("rows.data", Kind.DATASET, DatasetFacts(format=format, columns=("prompt", "completion")))
    return {"model": [policy], "data": [data]}


@pytest.mark.parametrize(
    ("options", "inputs", "port", "words"),
    [
        ({"max_length": 129}, given(), "model", "takes 128 tokens"),
        ({"lora": {}}, given(Kind.ADAPTER), "model", "already is one"),
        ({"weight_column": "w"}, given(), "data", "weight column `w`"),
    ],
)
def test_check_finds(options: Any, inputs: Any, port: str, words: str):
    (finding,) = Sft().check(SftOptions(**options), inputs)
    assert (finding.level, finding.certainty, finding.port) == (Level.ERROR, Certainty.PREDICTED, port)
    assert words in finding.message and finding.fix


def test_check_is_silent_when_nothing_is_known_or_wrong():
    unknown = given(context=None, has_template=None, format="messages")
    assert list(Sft().check(SftOptions(max_length=512), unknown)) == []
    assert list(Dpo().check(DpoOptions(max_length=128), given(Kind.ADAPTER))) == []


def test_predictions(model: Artifact):
    full = Sft().predict(SftOptions(), given())["model"]
    assert (full.kind, full.facts.dtype, full.facts.context) == (Kind.MODEL, "float32", 128)
    real = {**given(), "model": [Input("base.model", Kind.MODEL, model.facts, artifact=model)]}
    adapted = Sft().predict(SftOptions(lora={"r": 2}), real)["model"]
    assert (adapted.kind, adapted.facts.base) == (Kind.ADAPTER, model.digest)
    continued = Dpo().predict(DpoOptions(), given(Kind.ADAPTER, base="b" * 64))["model"]
    assert (continued.kind, continued.facts.base) == (Kind.ADAPTER, "b" * 64)


def test_ports():
    assert [(port.name, port.formats, port.training) for port in Dpo.inputs] == [
        ("model", frozenset(), False),
        ("data", frozenset({"preference", "token_pairs"}), True),
        ("eval", frozenset({"preference", "token_pairs"}), False),
        ("log_probs", frozenset(), False),
    ]
    assert Sft().outputs(SftOptions(lora={}))[0].kinds == {Kind.ADAPTER}
    assert Sft().outputs(SftOptions())[0].kinds == {Kind.MODEL, Kind.ADAPTER}


def test_estimates():
    found = Sft().estimate(SftOptions(max_length=10, batch_size=2), given())
    # weights, gradients, two moments; 20 tokens: (2 + 1) layers · 17 · 16 floats; logits and their gradient
    assert found.memory_bytes == 4 * (4 * 1000 + 20 * 16 * 3 * 17 + 2 * 20 * 80)
    assert (found.parameters, found.trainable) == (1000, 1000)
    assert Sft().estimate(SftOptions(lora={"r": 1}), given()).trainable == 2 * (8 * 16 + 15 * 16)
    assert Sft().estimate(SftOptions(), given(layers=None)) is None
    # rows of 128 tokens: a batch of eight is cut by a budget of 1024, and pairs are twice as many rows
    sft, dpo = Sft().estimate(SftOptions(), given()), Dpo().estimate(DpoOptions(), given())
    assert dpo.memory_bytes == sft.memory_bytes
    uncut = Dpo().estimate(DpoOptions(micro_batch_tokens=2048), given())
    assert uncut.memory_bytes - 4 * 4000 == 2 * (sft.memory_bytes - 4 * 4000)


def footprint(uses: str, kind: Kind = Kind.MODEL, gpus: int = 0, **options: Any) -> Any:
    stage = catalogue().stage(uses)
    shape = {"tie_word_embeddings": False}
    return stage.estimate(configured(stage, **options), given(kind, parameters=100_000, shape=shape), gpus)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda")])
def test_the_estimate_cuts_steps_as_the_run_does(gpus: int, device: str):
    told = footprint("train.sft", gpus=gpus, batch_size=1000).note
    assert f"micro-batches of {TOKENS[device]} tokens" in told
    assert f"micro-batches of {SftOptions().budget(device)} tokens" in told
    assert "at least" in footprint("train.sft", gpus=gpus, micro_batch_tokens="auto").note
    assert "of 300 tokens" in footprint("train.sft", micro_batch_tokens=300).note


@pytest.mark.parametrize("uses", ["train.reward", "train.prm"])
def test_a_model_that_gives_numbers_has_no_vocabulary_head_in_the_estimate(uses: str):
    found, policy = footprint(uses), footprint("train.dpo")
    assert policy.parameters - found.parameters == 80 * 16
    assert found.memory_bytes < policy.memory_bytes - 4 * 2 * 80 * 100
    frozen = footprint(uses, trunk="frozen")
    assert frozen.trainable == 2 * 16 and frozen.memory_bytes < found.memory_bytes


def test_what_a_backend_splits_is_divided_in_the_estimate():
    def of(**backend: Any) -> int:
        return footprint("train.sft", max_length=8, batch_size=4, backend=backend).memory_bytes

    alone = footprint("train.sft", max_length=8, batch_size=1).memory_bytes
    assert of(name="ddp", ranks=4) == alone
    # of 4 floats a weight: 2 moments, then the gradient, then the weights, of which one layer is gathered
    stages = {1: 2, 2: 3}
    for stage, floats in stages.items():
        assert alone - of(name="deepspeed", ranks=4, stage=stage) == 4 * 100_000 * floats * 3 // 4
    gathered = 4 * 100_000 // 2
    assert alone - of(name="fsdp2", ranks=4) == 4 * 100_000 * 3 - gathered
    assert of(name="deepspeed", ranks=4, stage=3) == of(name="fsdp2", ranks=4)
    assert of(name="fsdp2", ranks=1000) >= 4 * 100_000, "each rank opens the whole model"
    opened = {
        name: footprint(
            "train.sft", gpus=9, max_length=2, batch_size=1, backend={"name": name, "ranks": 9, **options}
        )
        for name, options in (("fsdp2", {}), ("deepspeed", {"stage": 3}))
    }
    assert opened["deepspeed"].memory_bytes >= 4 * 100_000 > opened["fsdp2"].memory_bytes
    assert "a rank" in footprint("train.sft", backend={"name": "ddp", "ranks": 2}).note


def test_the_light_half_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys, posttrain_plugins.trainers.sft, posttrain_plugins.trainers.dpo; "
        "import posttrain_plugins.losses.token.nll, posttrain_plugins.losses.preference.sigmoid; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
