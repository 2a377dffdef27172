"""Kinds of faults that users of adapters met elsewhere, tried on the whole trainers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import ADAPTERS, Bench, advance, gap, logits, optimizer_of, trained_parameters
from helpers.contexts import FakeContext
from helpers.models import ALPHABET, as_artifact
from helpers.training import completion_rows, context_for, model_artifact, preference_rows, train, weights
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from posttrain.artifacts.manifest import Artifact
from posttrain.errors import DataError, Interrupted, StageError, StoreError
from posttrain_plugins.models import policy as policy_module
from posttrain_plugins.models.adapters import adapter_state, merged, save_adapter
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import load_model, open_policy
from posttrain_plugins.training import starting as starting_module
from posttrain_plugins.training.starting import StartingPolicy

pytestmark = pytest.mark.slow

EXACT = 1e-5
LN2 = math.log(2)
NEW = "<plan>"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "attention_bias": True}
    return Bench(model_artifact(tmp_path_factory.mktemp("base"), **sizes))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model_artifact(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=64))


def sft(directory: Path, model: Artifact, rows: Any = None, **options: Any) -> FakeContext:
    chosen = {"max_steps": 3, "batch_size": 4, **options}
    return context_for(
        directory, "train.sft", model, rows or completion_rows(), "prompt_completion", **chosen
    )


def dpo(directory: Path, model: Artifact, **options: Any) -> FakeContext:
    chosen = {"max_steps": 1, "batch_size": 4, **options}
    return context_for(directory, "train.dpo", model, preference_rows(), "preference", **chosen)


# A reference that is not the policy that training starts from.


STARTS: Mapping[str, Mapping[str, Any]] = {
    **{name: options for name, options in ADAPTERS.items()},
    "full": {},
    "nf4": {**ADAPTERS["lora"], "quantization": {}},
    "fp4": {**ADAPTERS["dora"], "quantization": {"type": "fp4", "double": False}},
    "8 bits": {**ADAPTERS["lora"], "quantization": {"bits": 8}},
}
CONTINUED = ["lora", "dora", "rslora", "pissa", "olora", "whole head", "tokens", "hra"]
ROUNDED = ["nf4", "fp4", "8 bits"]


@pytest.mark.parametrize("name", STARTS)
def test_dpo_starts_at_ln_2_in_every_set_up(tmp_path: Path, bench: Bench, wide: Bench, name: str):
    base = wide.base if name in ROUNDED else bench.base
    context = dpo(tmp_path, base, max_steps=2, **STARTS[name])
    train(context)
    assert context.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert context.losses[1] != context.losses[0]


@pytest.mark.parametrize("name", [*CONTINUED, *ROUNDED])
def test_dpo_goes_on_from_an_adapter_as_its_own_reference(
    tmp_path: Path, bench: Bench, wide: Bench, name: str, monkeypatch: pytest.MonkeyPatch
):
    """The reference is what was trained, not the raw base, and there is no second copy of either."""
    base, options = (wide if name in ROUNDED else bench).base, STARTS[name]
    first = sft(tmp_path / "first", base, **options)
    train(first)
    second = dpo(tmp_path / "second", first.result("model"), quantization=options.get("quantization"))
    second.known[base.digest] = base
    opened = []
    plain = policy_module.load_model
    monkeypatch.setattr(policy_module, "load_model", lambda *given: opened.append(given) or plain(*given))
    train(second)
    assert second.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert len(opened) == 1
    facts = second.result("model").facts
    assert facts.base == base.digest
    assert (facts.quantization or {}).get("bits") == {"nf4": 4, "fp4": 4, "8 bits": 8}.get(name)


def test_a_reference_that_is_the_base_would_be_noticed(tmp_path: Path, bench: Bench):
    """What the tests above would miss if they could not fail: the base and the adapter on it are far apart."""
    first = sft(tmp_path / "first", bench.base, **ADAPTERS["lora"])
    train(first)
    model = bench.opened(first.result("model")).model
    with model.disable_adapter():
        base = logits(model)
    assert gap(logits(model), base) > 0.01


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_few_bits_are_not_trained(tmp_path: Path, wide: Bench, bits: int):
    with pytest.raises(StageError, match="cannot be trained"):
        train(sft(tmp_path, wide.base, quantization={"bits": bits}))


# Gradient checkpointing over frozen embeddings: no gradient reaches the adapters.


@pytest.mark.parametrize("quantization", [None, {}, {"bits": 8}])
def test_adapters_learn_under_gradient_checkpointing(tmp_path: Path, wide: Bench, quantization: Any):
    losses = []
    for checkpointing in (False, True):
        directory = tmp_path / str(checkpointing)
        context = sft(
            directory,
            wide.base,
            **ADAPTERS["lora"],
            gradient_checkpointing=checkpointing,
            quantization=quantization,
        )
        train(context)
        losses.append(context.losses)
        learned = {n: t for n, t in weights(directory / "out-model").items() if "lora_B" in n}
        assert learned and all(float(tensor.detach().norm()) > 0 for tensor in learned.values())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_learn_under_either_kind_of_checkpointing(bench: Bench, reentrant: bool):
    model = bench.fresh(ADAPTERS["lora"]).model
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    advance(model, optimizer_of(model), 2)
    learned = {n: t for n, t in trained_parameters(model).items() if "lora_B" in n}
    assert learned and all(float(tensor.detach().norm()) > 0 for tensor in learned.values())


# Tied embeddings of which one is trained: the other must not follow, nor the training be lost.


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("whole head", False),
        ("whole embeddings", False),
        ("on the head", False),
        ("on the embeddings", False),
        ("tokens", True),
        ("lora", True),
    ],
)
def test_a_merged_model_says_whether_its_embeddings_are_tied(
    tmp_path: Path, bench: Bench, name: str, tied: bool
):
    context = sft(tmp_path, bench.base, **ADAPTERS[name])
    train(context)
    adapter = context.result("model")
    before = logits(bench.opened(adapter).model)
    merged(bench.opened(adapter).model).save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert gap(logits(again), before) < EXACT
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in weights(tmp_path / "merged")) is not tied


# Added tokens: the adapter must bring their embeddings along.


def with_new_token(directory: Path, resize: bool, special: bool = True) -> Artifact:
    """A model whose tokenizer got one more token than its vocabulary had."""
    model_artifact(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([AddedToken(NEW, special=special)])
    tokenizer.save(str(directory / "tokenizer.json"))
    if resize:
        model = load_model(directory, "float32")
        model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
        model.save_pretrained(directory)
    return as_artifact(directory, facts_of(directory))


def test_added_tokens_are_trained_and_saved(tmp_path: Path):
    bench = Bench(with_new_token(tmp_path / "base", resize=True))
    rows = [{"prompt": f"{NEW}{i}", "completion": f"{NEW}ok{i}"} for i in range(4)]
    context = sft(tmp_path, bench.base, rows, lora={"r": 2, "trainable_tokens": [NEW]})
    train(context)
    policy = bench.opened(context.result("model"))
    new = policy.encoder.files.plain.token_to_id(NEW)
    assert new == policy.encoder.vocabulary - 1
    before = load_model(bench.base.path, "float32").get_input_embeddings().weight
    after = merged(policy.model).get_input_embeddings().weight
    changed = (after != before).any(1).nonzero().flatten().tolist()
    assert changed == [new]


def test_tokens_without_embeddings_are_refused_when_a_model_is_opened(tmp_path: Path):
    broken = with_new_token(tmp_path / "base", resize=False, special=False)
    with pytest.raises(StageError) as caught:
        open_policy(broken, Bench(broken))
    assert f"{len(ALPHABET) + 4} embeddings" in str(caught.value)


def test_a_reserved_token_without_an_embedding_harms_rows_that_hold_it_alone(tmp_path: Path):
    """Gemma 3's text models come with one."""
    reserved = with_new_token(tmp_path / "base", resize=False)
    facts = reserved.facts
    assert facts.reachable == facts.embeddings == facts.vocabulary - 1
    good = {"prompt": "1", "completion": "ok"}
    train(sft(tmp_path / "good", reserved, [good]))
    with pytest.raises(
        DataError, match="the row holds a token that the model has no embedding for"
    ) as caught:
        train(sft(tmp_path / "bad", reserved, [good, {"prompt": NEW, "completion": "ok"}]))
    assert caught.value.where == "row 2"


# Looking at the starting policy again and again must not move a base weight.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "whole head"])
def test_a_hundred_looks_at_the_start_move_no_weight(bench: Bench, name: str, dtype: torch.dtype):
    model = bench.fresh(ADAPTERS[name]).model.to(dtype)
    starting = StartingPolicy.of(model, lambda: logits(model))
    start = logits(model)
    advance(model, optimizer_of(model), 2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for number in range(100):
        if number % 10:
            with starting.active():
                pass
            continue
        with pytest.raises(RuntimeError, match="in the middle"), starting.active():
            assert torch.equal(logits(model), start)
            raise RuntimeError("in the middle")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_look_that_fails_while_it_begins_moves_no_weight(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    model = bench.fresh(ADAPTERS["pissa"]).model
    starting = StartingPolicy.of(model, lambda: logits(model))
    advance(model, optimizer_of(model), 2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    plain, calls = starting_module._exchange, []

    def failing(*pair: torch.Tensor) -> None:
        calls.append(pair)
        if len(calls) == 5:
            raise MemoryError
        plain(*pair)

    monkeypatch.setattr(starting_module, "_exchange", failing)
    with pytest.raises(MemoryError), starting.active():
        pass
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# Adapters saved from parts of tensors are noticed when they are saved.


def emptied(state: dict[str, Any], name: str) -> None:
    state[name] = torch.empty(0)


def flattened(state: dict[str, Any], name: str) -> None:
    state[name] = state[name].flatten()


def removed(state: dict[str, Any], name: str) -> None:
    del state[name]


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        *((damage, part) for damage in (emptied, flattened, removed) for part in ("lora_A", "lora_B")),
        *((damage, "modules_to_save") for damage in (emptied, removed)),
    ],
)
def test_an_adapter_of_parts_is_not_saved(
    tmp_path: Path, bench: Bench, damage: Callable[[dict[str, Any], str], None], part: str
):
    model = bench.fresh(ADAPTERS["whole head"]).model
    state = dict(model.state_dict())
    assert adapter_state(model, state).keys() == adapter_state(model).keys()
    damage(state, next(name for name in state if part in name))
    with pytest.raises(StageError, match="not complete"):
        save_adapter(tmp_path, model, bench.base.digest, state=state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [False, True])
def test_what_is_trained_but_not_saved_is_noticed(tmp_path: Path, bench: Bench, given: bool):
    model = bench.fresh(ADAPTERS["lora"]).model
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(StageError, match="would not be saved"):
        save_adapter(tmp_path, model, bench.base.digest, state=dict(model.state_dict()) if given else None)


def test_an_adapter_file_with_a_missing_tensor_is_not_opened(tmp_path: Path, bench: Bench):
    adapter = bench.saved(tmp_path, bench.fresh(ADAPTERS["lora"]))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file, metadata={"format": "pt"})
    with pytest.raises(StoreError, match="not those that its config asks for"):
        bench.opened(adapter)


# A resume that restores the step and not the adapter.


@pytest.mark.parametrize("name", ["lora", "pissa", "tokens", "vera"])
def test_five_steps_and_five_more_are_ten(tmp_path: Path, bench: Bench, name: str):
    train(sft(tmp_path / "whole", bench.base, max_steps=10, **ADAPTERS[name]))
    first = sft(tmp_path / "parts", bench.base, max_steps=10, **ADAPTERS[name])
    first.stop_at = 5
    with pytest.raises(Interrupted):
        train(first)
    train(sft(tmp_path / "parts", bench.base, max_steps=10, **ADAPTERS[name]))
    one, other = weights(tmp_path / "whole" / "out-model"), weights(tmp_path / "parts" / "out-model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("bits", [4, 8])
def test_five_steps_and_five_more_are_ten_in_few_bits(tmp_path: Path, wide: Bench, bits: int):
    options = {"max_steps": 10, "quantization": {"bits": bits}, **ADAPTERS["lora"]}
    train(sft(tmp_path / "whole", wide.base, **options))
    first = sft(tmp_path / "parts", wide.base, **options)
    first.stop_at = 5
    with pytest.raises(Interrupted):
        train(first)
    train(sft(tmp_path / "parts", wide.base, **options))
    one, other = weights(tmp_path / "whole" / "out-model"), weights(tmp_path / "parts" / "out-model")
    assert all(torch.equal(one[key], other[key]) for key in one)
