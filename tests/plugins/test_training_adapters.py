"""Every kind of adapter is trained, saved, opened again and merged, and computes the same each time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.adapters import (
    ADAPTERS,
    LORAS,
    OTHERS,
    TOKENS,
    Bench,
    adapter_of,
    advance,
    gap,
    logits,
    optimizer_of,
    trained_parameters,
)
from helpers.models import as_artifact, char_tokenizer, tiny_llama
from helpers.training import model_artifact, weights
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import Input, Level
from posttrain.errors import StageError
from posttrain.registry.components import ConfigProblems, validate_config
from posttrain.registry.discovery import discover
from posttrain_plugins.models.adapters import merged
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.models.quantized import dequantized
from posttrain_plugins.trainers.sft import Sft, SftOptions
from posttrain_plugins.training.adapters import with_adapter
from posttrain_plugins.training.options import TrainingOptions
from posttrain_plugins.training.peft_options import Lora, OtherAdapter, Quantization, adapter_size

EXACT = 1e-5
MOVED = 1e-3
QUANTIZATIONS = {
    "nf4": Quantization(),
    "fp4": Quantization(type="fp4", double=False),
    "8 bits": Quantization(bits=8),
}
QUANTIZABLE = ["lora", "dora", "gaussian", "tokens", "ia3", "oft", "vera"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("base"), attention_bias=True))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The 4-bit kernels of CPUs want multiples of 32."""
    return Bench(model_artifact(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=64))


def tiny_gpt2(vocabulary: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_was_trained_is_what_is_opened_and_merged(tmp_path: Path, bench: Bench, name: str):
    start = logits(load_model(bench.base.path, "float32"))
    adapted = bench.fresh(ADAPTERS[name])
    assert gap(logits(adapted.model), start) < EXACT
    trained = trained_parameters(adapted.model)
    advance(adapted.model, optimizer_of(adapted.model, 3e-2))
    end = logits(adapted.model)
    assert gap(end, start) > MOVED

    adapter = bench.saved(tmp_path / "adapter", adapted)
    policy = bench.opened(adapter, trainable=True)
    assert gap(logits(policy.model), end) < EXACT
    assert set(trained_parameters(policy.model)) == set(trained)
    assert adapter.facts.base == bench.base.digest and adapter.facts.parameters

    plain = merged(bench.opened(adapter).model)
    assert gap(logits(plain), end) < EXACT
    plain.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert gap(logits(again), end) < EXACT


def test_every_method_is_tried_here():
    assert set(OTHERS) == {arm.__name__.lower() for arm in get_args(OtherAdapter)}
    tried = {options.get("init", "default") for options in LORAS.values()}
    assert tried == set(get_args(Lora.model_fields["init"].annotation))


@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "pissa fast", "vera", "ia3"])
def test_layers_with_transposed_weights(tmp_path: Path, name: str):
    directory = tmp_path / "base"
    tiny_gpt2(char_tokenizer(directory).get_vocab_size()).save_pretrained(directory)
    bench = Bench(as_artifact(directory, facts_of(directory)))
    adapted = bench.fresh(ADAPTERS[name])
    advance(adapted.model, optimizer_of(adapted.model, 3e-2))
    end = logits(adapted.model)
    assert gap(end, logits(load_model(directory, "float32"))) > MOVED
    adapter = bench.saved(tmp_path / "adapter", adapted)
    assert gap(logits(bench.opened(adapter).model), end) < EXACT
    assert gap(logits(merged(bench.opened(adapter).model)), end) < EXACT


def test_an_initialization_that_does_not_suit_the_layers_is_refused():
    # OLoRA takes weights that are kept as inputs × outputs for their transpose.
    with pytest.raises(StageError, match="does not fit the model"):
        with_adapter(tiny_gpt2(80), Lora(r=2, init="olora", target_modules=["attn.c_proj"]))


def test_a_saved_pissa_adapter_has_twice_the_rank_and_the_same_scale(tmp_path: Path, bench: Bench):
    adapter = bench.saved(tmp_path, bench.fresh({"lora": {"r": 2, "alpha": 8, "init": "pissa"}}))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (4, 16, True)
    assert all(tensor.shape[0] == 4 for name, tensor in weights(adapter.path).items() if "lora_A" in name)


@pytest.mark.parametrize("name", ["lora", "pissa fast", "vera"])
def test_the_same_seed_makes_the_same_file(tmp_path: Path, bench: Bench, name: str):
    for number, seed in enumerate((5, 5, 6)):
        bench.saved(tmp_path / str(number), bench.fresh(ADAPTERS[name], seed=seed))
    one, again, other = (
        (tmp_path / str(number) / "adapter_model.safetensors").read_bytes() for number in range(3)
    )
    assert one == again
    # The random matrices of VeRA come from a key of its own.
    assert (one == other) == (name == "vera")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ["q_proj", "no_such"]}, "`no_such` in target_modules"),
        ({"exclude_modules": ["no_such"]}, "`no_such` in exclude_modules"),
        ({"modules_to_save": ["no_such"]}, "`no_such` in modules_to_save"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [7]}, "no layer 7"),
        ({"target_modules": ["input_layernorm"]}, "not supported"),
        ({"r": 17, "init": "pissa"}, "directions, and r is 17"),
        ({"trainable_tokens": ["nothing like it"]}, "no such token"),
    ],
)
def test_what_fits_nothing_is_refused(bench: Bench, options: dict[str, Any], said: str):
    with pytest.raises(StageError) as caught:
        bench.fresh({"lora": options})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora": {}, "peft": {"method": "loha"}}, "exclude each other"),
        ({"peft": {"method": "prompt_tuning"}}, "does not match any of the expected tags"),
        ({"peft": {"method": "hra", "alpha": 3}}, "not permitted"),
        ({"peft": {"method": "ia3", "feedforward_modules": ["down_proj"]}}, "must stand in target_modules"),
        ({"peft": {"method": "hra", "r": 3}}, "multiple of 2"),
        ({"lora": {"layers_to_transform": [0]}}, "needs target_modules to be a list"),
        ({"lora": {"pissa_niter": 4}}, "would be ignored"),
        ({"lora": {"init": "orthogonal", "r": 3}}, "needs an even r"),
        ({"lora": {"init": "pissa"}, "quantization": {}}, "changes the base"),
        ({"peft": {"method": "loha"}, "quantization": {}}, "without quantization"),
        ({"lora": {}, "quantization": {"bits": 3}}, "Input should be 4 or 8"),
        ({"lora": {}, "quantization": {"bits": 8, "type": "fp4"}}, "type would be ignored"),
        ({"lora": {}, "quantization": {"bits": 8, "double": False}}, "double would be ignored"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        TrainingOptions(**options)


def test_a_misspelt_option_of_a_method_is_pointed_out():
    with pytest.raises(ConfigProblems) as caught:
        validate_config(SftOptions, {"peft": {"method": "delora", "delora_lamda": 3}}, discover())
    (problem,) = caught.value.problems
    assert problem.path == ("peft", "delora_lamda") and "delora_lambda" in str(problem.suggestion)


@pytest.mark.parametrize("name", QUANTIZABLE)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_adapters_are_trained_on_a_base_in_few_bits(tmp_path: Path, wide: Bench, name: str, kind: str):
    quantization = QUANTIZATIONS[kind]
    adapted = wide.fresh(ADAPTERS[name], quantization=quantization)
    layer = f"Linear{quantization.bits}bit"
    assert layer in {type(module).__name__ for module in adapted.model.modules()}
    start = logits(adapted.model)
    frozen = {n: p for n, p in adapted.model.named_parameters() if not p.requires_grad}
    before = {n: p.clone() for n, p in frozen.items()}
    advance(adapted.model, optimizer_of(adapted.model, 3e-2))
    end = logits(adapted.model)
    assert gap(end, start) > MOVED
    assert all(torch.equal(frozen[n], before[n]) for n in frozen)
    adapter = wide.saved(tmp_path, adapted)
    assert (adapter.facts.base, adapter.facts.dtype) == (wide.base.digest, "float32")
    assert gap(logits(wide.opened(adapter, quantization=quantization).model), end) < EXACT
    assert gap(logits(wide.opened(adapter).model), end) > EXACT


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_gradients_on_a_base_in_few_bits_are_those_on_the_rounded_base(wide: Bench, kind: str):
    quantized = wide.fresh(ADAPTERS["lora"], quantization=QUANTIZATIONS[kind]).model
    plain = wide.fresh(ADAPTERS["lora"]).model
    whole = dequantized(load_model(wide.base.path, "float32", quantization=QUANTIZATIONS[kind]))
    rounded = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.get_base_model().named_parameters():
            if "lora_" not in name:
                parameter.copy_(rounded[name.replace(".base_layer", "")])
        for model in (quantized, plain):
            for name, parameter in trained_parameters(model).items():
                parameter.add_(0.1 * ("lora_B" in name))
    # A look without gradients first, as at the head and the reference, must not change what follows.
    assert gap(logits(quantized), logits(plain)) < EXACT
    for model in (quantized, plain):
        model.train()
        model(input_ids=TOKENS, use_cache=False).logits.float().pow(2).mean().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in trained_parameters(quantized).items():
        assert parameter.grad is not None and parameter.grad.norm() > 0
        assert gap(parameter.grad, gradients[name]) < 1e-3 * float(gradients[name].abs().max())


def test_a_row_in_8_bits_does_not_depend_on_the_rows_beside_it(wide: Bench):
    """Outliers of another row are what bitsandbytes' own product would let through."""
    model = load_model(wide.base.path, "float32", quantization=Quantization(bits=8))
    layer = model.model.layers[0].self_attn.q_proj
    rows = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    rows[1, :, 3] = 50.0
    assert gap(layer(rows)[:1], layer(rows[:1])) < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(rows).dtype == torch.bfloat16


def findings(bench: Bench, **options: Any) -> list[Any]:
    model = Input("base.model", bench.base.kind, bench.base.facts, bench.base)
    data = Input("rows.data", Kind.DATASET, DatasetFacts())
    return list(Sft().check(SftOptions(**options), {"model": [model], "data": [data]}))


def test_a_base_in_few_bits_needs_an_adapter(bench: Bench):
    (finding,) = findings(bench, quantization={})
    assert finding.level is Level.ERROR and "cannot be trained" in finding.message
    assert findings(bench, quantization={}, lora={}) == []


def test_a_plan_says_that_bitsandbytes_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    (finding,) = findings(bench, quantization={}, lora={})
    assert finding.level is Level.ERROR and "posttrain[quant]" in str(finding.fix)
    with pytest.raises(StageError, match="needs bitsandbytes"):
        bench.fresh({"lora": {}}, quantization=Quantization())


@pytest.mark.parametrize("name", sorted(ADAPTERS.keys() - {"biases", "biases of targets"}))
def test_the_size_is_known_roughly_beforehand(name: str):
    model = tiny_llama(80, hidden_size=32, intermediate_size=128, num_key_value_heads=2)
    adapter = adapter_of(ADAPTERS[name])
    ids = iter(range(10))
    adapted = with_adapter(model, adapter, lambda token: next(ids)).model
    real = sum(parameter.numel() for parameter in trained_parameters(adapted).values())
    guess = adapter_size(adapter, 2, 32, 80)
    # Names that are listed are not looked up at that time: all linear layers are reckoned with.
    assert 0.7 <= guess / real <= (2.5 if adapter.target_modules == "all-linear" else 12)
