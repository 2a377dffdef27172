"""Adapters become models that compute the same, whatever they are, and models are averaged."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import ADAPTERS, Bench, advance, gap, logits, optimizer_of
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.sites import adapter as adapter_input
from helpers.sites import findings, policy, site, summary
from helpers.training import model_artifact, weights
from helpers.vision import write_model
from pydantic import ValidationError
from torch import Tensor

from posttrain.artifacts.kinds import Kind, MergeFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, Outcome
from posttrain.errors import StageError
from posttrain_plugins.handoffs.adapters import MergeChanged
from posttrain_plugins.handoffs.weights import ShapeChanged
from posttrain_plugins.models import adapted, merging, probe
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.average import Average, AverageConfig
from posttrain_plugins.models.averaging import run as average_run
from posttrain_plugins.models.merge import Merge, MergeConfig
from posttrain_plugins.models.mixtures import Recipe, equal_or
from posttrain_plugins.models.policy import load_model, open_policy, save_policy
from posttrain_plugins.models.quantized import dequantized
from posttrain_plugins.rollouts.generation import generate
from posttrain_plugins.training.peft_options import Quantization

EXACT = 1e-5
MOVED = 1e-3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("base"), attention_bias=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=64))


def trained(directory: Path, bench: Bench, name: str, quantization: Quantization | None = None) -> Artifact:
    """An adapter that was trained for a few steps."""
    adapted = bench.fresh(ADAPTERS[name], quantization=quantization)
    advance(adapted.model, optimizer_of(adapted.model, 3e-2))
    directory.mkdir(parents=True, exist_ok=True)
    facts = save_policy(
        directory,
        adapted.model,
        bench.base.path,
        bench.base.digest,
        initial=adapted.initial,
        quantization=quantization,
    )
    return as_artifact(directory, facts, Kind.ADAPTER)


def merge(directory: Path, adapter: Artifact, base: Artifact, **options: Any) -> tuple[FakeContext, Outcome]:
    stage = catalogue().stage("model.merge")
    context = FakeContext(directory, stage, configured(stage, **options), {"adapter": [adapter]})
    context.known[base.digest] = base
    return context, merging.run(context)


def content(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


# One adapter, one model.


@pytest.mark.parametrize(
    "name", ["lora", "dora", "pissa", "whole head", "on the embeddings", "tokens", "hra", "vera"]
)
def test_a_merged_model_computes_what_the_adapter_does(tmp_path: Path, bench: Bench, name: str):
    adapter = trained(tmp_path / "adapter", bench, name)
    before, kept = logits(bench.opened(adapter).model), content(bench.base.path)
    context, outcome = merge(tmp_path / "merged", adapter, bench.base)
    model = context.result("model")
    assert gap(logits(open_policy(model, context).model), before) < EXACT
    assert outcome.figures["logit_gap"] < EXACT < MOVED < outcome.figures["adapter_effect"]
    assert outcome.figures["same_top_token"] == 1
    assert model.kind is Kind.MODEL and model.facts.base is None and model.facts.adapter is None
    assert model.facts.merge.gap == 0 and model.facts.merge.effect > MOVED
    assert model.facts.tokenizer == bench.base.facts.tokenizer
    assert model.facts.template == bench.base.facts.template
    assert content(bench.base.path) == kept
    assert model.facts == facts_of(model.path).model_copy(update={"merge": model.facts.merge})


def test_the_same_adapter_merges_into_the_same_bytes(tmp_path: Path, bench: Bench):
    adapter = trained(tmp_path / "adapter", bench, "lora")
    one, other = (merge(tmp_path / name, adapter, bench.base)[0] for name in ("one", "other"))
    assert content(one.output("model")) == content(other.output("model"))
    assert one.result("model").digest == other.result("model").digest


def test_a_merge_adds_the_product_in_float32_whatever_the_base(tmp_path: Path):
    """Hand-worked: W + (α/r) B A, where W is held in bfloat16 and what is added is below its last bit."""
    whole, directory = model_artifact(tmp_path / "whole"), tmp_path / "base"
    directory.mkdir()
    save_policy(directory, load_model(whole.path, "bfloat16"), whole.path)
    bench = Bench(as_artifact(directory, facts_of(directory)))
    assert bench.base.facts.dtype == "bfloat16"
    adapted = bench.fresh({"lora": {"r": 1, "alpha": 2, "target_modules": ["q_proj"]}})
    for name, parameter in adapted.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter.data, 1e-3)
    adapter = bench.saved(tmp_path / "adapter", adapted)
    context, _ = merge(tmp_path / "merged", adapter, bench.base)
    before, after = weights(directory), weights(context.output("model"))
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(after[name], before[name].float() + 2 * 1e-6, rtol=0, atol=1e-8)
    assert after[name].dtype == torch.float32
    other = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(after[other], before[other].float())


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_what_16_bits_round_away_is_told(tmp_path: Path, bench: Bench, dtype: str, rounding: float):
    adapter = trained(tmp_path / "adapter", bench, "lora")
    context, outcome = merge(tmp_path / "merged", adapter, bench.base, dtype=dtype)
    facts = context.result("model").facts
    assert facts.dtype == dtype
    assert 0 < outcome.figures["rounding_gap"] < rounding
    assert outcome.figures["merge_gap"] < EXACT
    assert facts.merge.gap == pytest.approx(outcome.figures["logit_gap"], rel=0.06)


def test_a_base_in_shards_is_merged(tmp_path: Path, bench: Bench):
    directory = tmp_path / "base"
    save_policy_in_shards(directory, bench.base)
    base = as_artifact(directory, facts_of(directory))
    sharded = Bench(base)
    adapter = trained(tmp_path / "adapter", sharded, "lora")
    context, outcome = merge(tmp_path / "merged", adapter, base)
    assert outcome.figures["logit_gap"] < EXACT
    assert context.result("model").facts.parameters == bench.base.facts.parameters


def save_policy_in_shards(directory: Path, model: Artifact) -> None:
    directory.mkdir()
    save_policy(directory, load_model(model.path, "float32"), model.path)
    (directory / "model.safetensors").unlink()
    load_model(model.path, "float32").save_pretrained(directory, max_shard_size="8KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_models_that_see_are_merged(tmp_path: Path, family: str):
    directory = write_model(tmp_path / "base", family)
    bench = Bench(as_artifact(directory, facts_of(directory)))
    adapted = bench.fresh({"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}})
    for name, parameter in adapted.model.named_parameters():
        if "lora_B" in name and "vis" not in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    adapter = bench.saved(tmp_path / "adapter", adapted)
    context, outcome = merge(tmp_path / "merged", adapter, bench.base)
    assert outcome.figures["logit_gap"] < 1e-3 < outcome.figures["adapter_effect"]
    assert (context.output("model") / "preprocessor_config.json").is_file()


def test_a_merge_that_changes_logits_is_refused(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    adapter = trained(tmp_path / "adapter", bench, "lora")
    plain = merging.merged

    def wrong(model: Any) -> Any:
        merged = plain(model)
        merged.model.layers[0].mlp.down_proj.weight.data += 0.05
        return merged

    monkeypatch.setattr(merging, "merged", wrong)
    with pytest.raises(StageError, match="merging changed what is computed") as caught:
        merge(tmp_path / "merged", adapter, bench.base)
    assert "a logit that differs by" in str(caught.value)


def test_weights_that_are_not_saved_as_they_are_merged_are_noticed(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    adapter = trained(tmp_path / "adapter", bench, "lora")
    plain = adapted.save_policy

    def untrained(directory: Path, model: Any, source: Path) -> Any:
        return plain(directory, load_model(bench.base.path, "float32"), source)

    monkeypatch.setattr(adapted, "save_policy", untrained)
    with pytest.raises(StageError, match="as saved in float32 compute something else"):
        merge(tmp_path / "merged", adapter, bench.base)


def test_nothing_that_a_policy_does_changes_its_base(tmp_path: Path, wide: Bench):
    """Generating and scoring with an adapter never merges it; the base in memory stays as it was, bit for bit."""
    adapter = trained(tmp_path / "adapter", wide, "dora")
    policy = wide.opened(adapter)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    for _ in range(3):
        generate(policy, [[4, 5, 6]], max_new_tokens=4)
        logits(policy.model)
        with policy.model.disable_adapter():
            logits(policy.model)
    after = policy.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    base = weights(wide.base.path)
    held = {
        name.replace(".base_layer", ""): t for name, t in policy.model.get_base_model().state_dict().items()
    }
    assert all(torch.equal(held[name], tensor) for name, tensor in base.items())


# Bases in few bits.

ROUNDINGS = {"nf4": Quantization(), "8 bits": Quantization(bits=8)}


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_what_was_trained_in_few_bits_is_merged_into_the_dequantized_base(
    tmp_path: Path, wide: Bench, kind: str
):
    adapter = trained(tmp_path / "adapter", wide, "lora", ROUNDINGS[kind])
    assert adapter.facts.quantization["bits"] == ROUNDINGS[kind].bits
    end = logits(wide.opened(adapter, quantization=ROUNDINGS[kind]).model)
    context, outcome = merge(tmp_path / "same", adapter, wide.base, into="dequantized")
    assert gap(logits(open_policy(context.result("model"), context).model), end) < EXACT
    assert outcome.figures["logit_gap"] < EXACT
    config = json.loads((context.output("model") / "config.json").read_text())
    assert "quantization_config" not in config
    assert context.result("model").facts.quantization is None


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_merging_it_into_the_whole_base_says_how_far_that_is(tmp_path: Path, wide: Bench, kind: str):
    adapter = trained(tmp_path / "adapter", wide, "lora", ROUNDINGS[kind])
    end = logits(wide.opened(adapter).model)
    context, outcome = merge(tmp_path / "other", adapter, wide.base)
    assert gap(logits(open_policy(context.result("model"), context).model), end) < EXACT
    assert outcome.figures["merge_gap"] < EXACT < 1e-4 < outcome.figures["logit_gap"]
    assert any("trained on a base in few bits" in note for note in context.notes)


def test_quantized_weights_are_not_merged_into(tmp_path: Path, wide: Bench):
    directory = tmp_path / "base"
    directory.mkdir()
    quantized = load_model(wide.base.path, "float32", quantization=Quantization())
    save_policy(directory, quantized, wide.base.path)
    base = as_artifact(directory, facts_of(directory))
    adapter = trained(tmp_path / "adapter", wide, "lora")
    facts = adapter.facts.model_copy(update={"base": base.digest})
    adapter = as_artifact(adapter.path, facts, Kind.ADAPTER)
    with pytest.raises(StageError, match="not merged into quantized weights"):
        merge(tmp_path / "refused", adapter, base)
    context, _ = merge(tmp_path / "merged", adapter, base, into="dequantized")
    whole = dequantized(load_model(wide.base.path, "float32", quantization=Quantization()))
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(weights(context.output("model"))[name], dict(whole.named_parameters())[name])


def test_there_must_be_something_to_dequantize(tmp_path: Path, bench: Bench):
    adapter = trained(tmp_path / "adapter", bench, "lora")
    with pytest.raises(StageError, match="nothing to dequantize"):
        merge(tmp_path / "merged", adapter, bench.base, into="dequantized")


# What a plan says.


def checked(config: MergeConfig, **facts: Any) -> list[tuple[str, str]]:
    found = Merge().check(config, {"adapter": [adapter_input(**facts)]})
    return [(str(finding.level), str(finding.certainty)) for finding in found]


def test_a_plan_knows_how_the_adapter_was_trained():
    base, whole = MergeConfig(), MergeConfig(into="dequantized")
    assert checked(base) == checked(base, verified=True) == []
    assert checked(whole) == []
    assert checked(whole, verified=True) == [("error", "verified")]
    assert checked(base, quantization={"bits": 4}) == [("note", "predicted")]
    assert checked(whole, quantization={"bits": 4}, verified=True) == []


def test_a_prediction_is_that_of_a_model():
    given = adapter_input(dtype="float32", base="b", adapter={"r": 2}, quantization={"bits": 4}, width=8)
    predicted = Merge().predict(MergeConfig(dtype="bfloat16"), {"adapter": [given]})["model"]
    assert predicted.kind is Kind.MODEL
    facts = predicted.facts
    assert (facts.dtype, facts.base, facts.adapter, facts.quantization, facts.width) == (
        "bfloat16",
        None,
        None,
        None,
        8,
    )


@pytest.mark.parametrize(
    ("gap", "effect", "expected"),
    [
        (0.2, 1.0, [("warning", "predicted")]),
        (0.05, 1.0, []),
        (0.0, 0.0, []),
        (None, 1.0, []),
    ],
)
def test_the_rule_on_merges(gap: float | None, effect: float, expected: list[tuple[str, str]]):
    at = site("measure", models=policy(merge=MergeFacts(gap=gap, effect=effect)))
    assert summary(MergeChanged, at) == expected
    if expected:
        (found,) = findings(MergeChanged, at)
        assert found.message == (
            "logits of sft.model differ from the policy that was trained by up to 0.2, and its adapter had "
            "changed them by up to 1"
        )


def test_the_rule_on_merges_knows_what_is_not_known():
    assert summary(MergeChanged, site("measure", models=policy())) == []


def test_untying_by_a_merge_is_no_change_of_the_architecture():
    made = site("merge", node="merged", adapter=adapter_input(shape={"tie_word_embeddings": True, "h": 1}))
    at = site("measure", made, models=policy("merged.model", shape={"tie_word_embeddings": False, "h": 1}))
    assert summary(ShapeChanged, at) == []
    at = site("measure", made, models=policy("merged.model", shape={"tie_word_embeddings": False, "h": 2}))
    (found,) = findings(ShapeChanged, at)
    assert "`h`" in found.message and "tie_word_embeddings" not in found.message


# The probe.


def test_the_probe_holds_text_and_tokens_at_random(bench: Bench):
    policy = open_policy(bench.base, bench)
    sequences = probe.probe_of(policy.encoder, 128)
    assert len(sequences) == 5 and all(1 < len(tokens) <= 128 for tokens in sequences)
    assert "<|im_start|>user\nWhat is the capital of France?" in policy.encoder.decode(sequences[0], False)
    special = set(policy.encoder.files.plain.get_added_tokens_decoder())
    assert not special & {token for tokens in sequences[3:] for token in tokens}
    assert sequences == probe.probe_of(policy.encoder, 128)
    assert max(map(len, probe.probe_of(policy.encoder, 10))) == 10


def test_a_number_that_is_none_is_an_infinite_gap():
    assert probe.gap([torch.tensor([math.nan])], [torch.zeros(1)]) == math.inf
    assert probe.gap([torch.tensor([1.0])], [torch.tensor([-2.0])]) == 3


# Several models.


def model_of(directory: Path, seed: int, **options: Any) -> Artifact:
    return model_artifact(directory, seed=seed, **options)


def average(
    directory: Path, models: list[Artifact], base: list[Artifact] | None = None, **options: Any
) -> FakeContext:
    stage = catalogue().stage("model.average")
    inputs = {"models": models, **({} if base is None else {"base": base})}
    context = FakeContext(directory, stage, configured(stage, **options), inputs)
    average_run(context)
    return context


def test_a_linear_average_by_hand(tmp_path: Path):
    models = [model_of(tmp_path / str(seed), seed) for seed in range(3)]
    context = average(tmp_path / "out", models, weights=[1, 2, 1])
    given = [weights(model.path) for model in models]
    for name, tensor in weights(context.output("model")).items():
        expected = given[0][name] / 4 + given[1][name] / 2 + given[2][name] / 4
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-8)
    assert context.result("model").facts == models[0].facts


def test_an_average_in_shards_of_another_precision(tmp_path: Path, bench: Bench):
    save_policy_in_shards(tmp_path / "one", bench.base)
    one = as_artifact(tmp_path / "one", facts_of(tmp_path / "one"))
    context = average(tmp_path / "out", [one, bench.base], dtype="bfloat16")
    assert len(list(context.output("model").glob("model-*.safetensors"))) > 2
    assert context.result("model").facts.dtype == "bfloat16"
    opened = load_model(context.output("model"), "float32")
    assert gap(logits(opened), logits(load_model(bench.base.path, "float32"))) < 2e-2


def mixed(method: str, tensors: list[list[float]], base: list[float] | None = None, **options: Any) -> Tensor:
    chosen = {"weights": equal_or(options.pop("weights", ()), len(tensors)), **options}
    found = [torch.tensor(values) for values in tensors]
    return Recipe(method, **chosen).mix(found, None if base is None else torch.tensor(base), 0)


def test_slerp_by_hand():
    # A quarter circle: halfway it is (cos 45°, sin 45°), a third of the way (cos 30°, sin 30°).
    torch.testing.assert_close(mixed("slerp", [[1.0, 0.0], [0.0, 1.0]]), torch.tensor([math.sqrt(0.5)] * 2))
    torch.testing.assert_close(
        mixed("slerp", [[1.0, 0.0], [0.0, 1.0]], weights=(2, 1)), torch.tensor([math.sqrt(0.75), 0.5])
    )
    torch.testing.assert_close(mixed("slerp", [[1.0, 1.0], [3.0, 3.0]]), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(mixed("slerp", [[1.0, 1.0], [-1.0, -1.0]]), torch.zeros(2))
    torch.testing.assert_close(mixed("slerp", [[0.0, 0.0], [2.0, 0.0]]), torch.tensor([1.0, 0.0]))


def test_ties_by_hand():
    # Of the differences (4, 1, -3, 0.1) and (2, -0.2, 5, 0.3) half is kept: (4, 0, -3, 0) and (2, 0, 5, 0). Signs
    # elected by sums: + and + for the entries 6 and 2. Means of what agrees: (4 + 2) / 2 and 5 / 1.
    tensors = [[5.0, 2.0, -2.0, 1.1], [3.0, 0.8, 6.0, 1.3]]
    found = mixed("ties", tensors, base=[1.0] * 4, density=0.5)
    torch.testing.assert_close(found, torch.tensor([4.0, 1.0, 6.0, 1.0]))
    torch.testing.assert_close(
        mixed("ties", tensors, base=[1.0] * 4, density=0.5, scale=2.0), torch.tensor([7.0, 1.0, 11.0, 1.0])
    )


def test_dare_keeps_by_chance_and_means_the_same():
    tensors, base = [[2.0] * 4000, [4.0] * 4000], [1.0] * 4000
    found = mixed("dare", tensors, base, density=0.5, seed=1)
    # (0 or 1/0.5 of a difference of 1) / 2 + (0 or 1/0.5 of 3) / 2
    assert set(found.tolist()) == {1.0, 2.0, 4.0, 5.0}
    assert float(found.mean()) == pytest.approx(3.0, abs=0.1)
    assert torch.equal(found, mixed("dare", tensors, base, density=0.5, seed=1))
    assert not torch.equal(found, mixed("dare", tensors, base, density=0.5, seed=2))
    state = torch.random.get_rng_state()
    mixed("dare", tensors, base, density=0.5)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_methods_on_differences_need_the_base_of_all(tmp_path: Path, bench: Bench, method: str):
    models = [bench.base, bench.base]
    context = average(tmp_path, models, [bench.base], method=method, density=0.3)
    before, after = weights(bench.base.path), weights(context.output("model"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def average_findings(config: AverageConfig, count: int = 2, base: bool = False, **other: Any) -> list[str]:
    models = [policy("a.model", width=8, tokenizer="t")]
    models += [
        policy(f"{number}.model", **{"width": 8, "tokenizer": "t", **other}) for number in range(count - 1)
    ]
    inputs = {"models": models, "base": [policy("base.model")] if base else []}
    found = list(Average().check(config, inputs))
    assert all(finding.level is Level.ERROR for finding in found)
    return [finding.message for finding in found]


def test_a_plan_says_what_cannot_be_averaged():
    plain = AverageConfig()
    assert average_findings(plain) == average_findings(plain, 3) == []
    assert average_findings(plain, 1) == ["`linear` takes 2 or more models, not 1"]
    assert average_findings(AverageConfig(method="slerp"), 3) == ["`slerp` takes 2 models, not 3"]
    assert average_findings(AverageConfig(weights=[1, 2, 3])) == ["there are 3 weights for 2 models"]
    (needs,) = average_findings(AverageConfig(method="ties", density=0.2))
    assert "needs the model that all come from" in needs
    (ignored,) = average_findings(plain, base=True)
    assert "would ignore" in ignored
    assert average_findings(plain, width=9) == ["a.model and 0.model differ in width: 8 and 9"]
    assert average_findings(plain, tokenizer="u") == ["a.model and 0.model differ in tokenizer: t and u"]
    assert average_findings(plain, tokenizer=None) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": 0.5}, "density would be ignored by `linear`"),
        ({"method": "ties", "density": 0.5, "seed": 1}, "seed would be ignored by `ties`"),
        ({"method": "dare"}, "needs `density`"),
        ({"weights": [1, 0]}, "greater than 0"),
        ({"weights": [1, -1]}, "greater than 0"),
        ({"method": "slerp", "scale": 2}, "scale would be ignored"),
    ],
)
def test_options_of_an_average_that_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        AverageConfig(**options)


def test_models_that_are_unlike_are_not_averaged(tmp_path: Path, bench: Bench):
    other = model_of(tmp_path / "other", 1)
    with pytest.raises(StageError, match="the models differ in"):
        average(tmp_path / "out", [bench.base, other])
    words = model_of(tmp_path / "words", 0, attention_bias=True, alphabet="abc.\n")
    with pytest.raises(StageError, match="the models differ in"):
        average(tmp_path / "out", [bench.base, words])
