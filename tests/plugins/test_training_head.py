"""Heads and their choice: every architecture gets scores that equal its own plain logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.models import tiny_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import StageError
from posttrain_plugins.training.head import (
    AnalyticHead,
    FullHead,
    GenericHead,
    Head,
    KeepHead,
    Tail,
    TokenScores,
    Wanted,
    budget_of,
    choose_head,
    unwrapped,
)
from posttrain_plugins.training.head.paths import forward_as
from posttrain_plugins.training.microbatch import MicroBatch, Segments

V = 40
EVERYTHING = Wanted(entropy=True, entropy_gradient=True, top1=True, squares=True, mean_logp=True)
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def padded(*sequences: tuple[list[int], list[int]]) -> MicroBatch:
    """Right-padded rows; each sequence is its tokens and the places of those that are supervised."""
    width = max((len(tokens) for tokens, _ in sequences), default=4)
    shape = (max(1, len(sequences)), width)
    tokens, real = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    chosen, targets, owner = [], [], []
    for row, (ids, places) in enumerate(sequences):
        tokens[row, : len(ids)] = torch.tensor(ids)
        real[row, : len(ids)] = True
        chosen += [row * width + place - 1 for place in places]
        targets += [ids[place] for place in places]
        owner += [row] * len(places)
    positions = torch.where(real, torch.arange(width), 0)
    lengths = torch.tensor([len(places) for _, places in sequences], dtype=torch.long)
    examples = [
        Example(row, (TokenSequence(ids, [i in places for i in range(len(ids))], "completion"),))
        for row, (ids, places) in enumerate(sequences)
    ]
    flat = [torch.tensor(values, dtype=torch.long) for values in (chosen, targets, owner)]
    return MicroBatch(examples, tokens, real, positions, *flat, lengths, torch.ones(len(sequences)))


PROBE = padded(([3, 4, 5, 6, 7], [2, 4]), ([7, 8, 9, 10, 11, 12, 13, 14], [1, 3, 4, 5, 6, 7]))
EMPTY = padded()


def expected(model: Any, micro: MicroBatch) -> TokenScores:
    """One row at a time, all logits, no padding."""
    found = []
    for example in micro.examples:
        (sequence,) = example.sequences
        places = [place for place, supervised in enumerate(sequence.supervised) if supervised]
        logits = unwrapped(model)(input_ids=torch.tensor([sequence.tokens])).logits[0].float()
        rows = logits[[place - 1 for place in places]].log_softmax(-1)
        found.append((rows, torch.tensor([sequence.tokens[place] for place in places])))
    rows, targets = torch.cat([rows for rows, _ in found]), torch.cat([targets for _, targets in found])
    probs = rows.exp()
    return TokenScores(
        rows.gather(1, targets[:, None])[:, 0],
        -(probs * rows).sum(-1),
        rows.argmax(-1) == targets,
        probs.square().sum(-1),
        mean_logp=rows.mean(-1),
    )


def total(found: TokenScores) -> Tensor:
    pull = torch.linspace(-1, 2, len(found.logp))
    return ((found.logp + found.entropy + found.squares + found.mean_logp) * pull).sum()


def assert_right(model: Any, head: Head, micro: MicroBatch = PROBE, tolerance: float = 1e-5) -> None:
    """Compare values and all parameters' gradients with the plain model's."""
    plain, found = expected(model, micro), head(model, micro, EVERYTHING)
    close = {"atol": tolerance, "rtol": tolerance}
    for name in ("logp", "entropy", "squares", "mean_logp"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), **close)
    assert found.top1.tolist() == plain.top1.tolist()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(total(plain), trained, allow_unused=True, materialize_grads=True)
    got = torch.autograd.grad(total(found), trained, allow_unused=True, materialize_grads=True)
    scale = max(float(gradient.abs().max()) for gradient in gradients)
    assert max(float((a - b).abs().max()) for a, b in zip(got, gradients, strict=True)) <= tolerance * scale


def built(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: built("Llama"),
    "llama, tied": lambda: built("Llama", tie_word_embeddings=True),
    "gpt2": lambda: built("GPT2", **GPT2),
    "qwen2": lambda: built("Qwen2"),
    "gemma2": lambda: built("Gemma2", final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "gemma3": lambda: built("Gemma3Text", query_pre_attn_scalar=8, final_logit_softcapping=None),
    "cohere": lambda: built("Cohere", logit_scale=0.25),
    "granite": lambda: built("Granite", logits_scaling=3.0),
    "phi": lambda: built("Phi", num_key_value_heads=2, partial_rotary_factor=0.5),
    "gpt-neox": lambda: built("GPTNeoX"),
    "opt": lambda: built("OPT", ffn_dim=32, word_embed_proj_dim=16),
    "bloom": lambda: built("Bloom", n_layer=2, n_head=2),
    "mamba": lambda: built("Mamba", state_size=4, conv_kernel=2, expand=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_get_the_fused_head_and_it_is_right(name: str) -> None:
    model = MODELS[name]()
    head, told = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, AnalyticHead) and told is None
    assert_right(model, head)


def test_the_tail_is_found() -> None:
    for name, tail in {
        "llama": Tail(),
        "gemma2": Tail(cap=3.0),
        "cohere": Tail(0.25),
        "granite": Tail(1 / 3),
    }.items():
        head, _ = choose_head(MODELS[name](), PROBE, 1e-4)
        assert isinstance(head, AnalyticHead) and head.tail == tail


def test_a_bound_far_above_the_logits_is_found_all_the_same() -> None:
    model = built("Gemma2", final_logit_softcapping=400.0, initializer_range=0.02, query_pre_attn_scalar=8)
    head, _ = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, AnalyticHead) and head.tail == Tail(cap=400.0)


@pytest.mark.parametrize(
    "head", [AnalyticHead(), GenericHead(vocabulary=V), KeepHead(), FullHead()], ids=repr
)
def test_every_head_is_right(head: Head) -> None:
    assert_right(built("Llama", tie_word_embeddings=True), head)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_heads_that_are_bounded_are_right_with_any_memory(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_plugins.training.head import paths

    monkeypatch.setattr(paths, "choose_chunk", lambda vocabulary, dtype: 3)
    model = built("Llama", tie_word_embeddings=True)
    for head in (AnalyticHead(memory=memory), GenericHead(memory=memory, vocabulary=V)):
        assert_right(model, head)


@pytest.mark.parametrize(
    "head", [AnalyticHead(), GenericHead(vocabulary=V), KeepHead(), FullHead()], ids=repr
)
def test_nothing_to_score_gives_gradients_of_zero(head: Head) -> None:
    model = built("Llama")
    found = head(model, EMPTY, EVERYTHING)
    assert found.logp.shape == (0,)
    total(found).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() == 0


def shared() -> MicroBatch:
    """Two answers after one prompt in one row: the prompt's last position predicts the first token of each."""
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    return MicroBatch(
        PROBE.examples,
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        torch.tensor([[0, 1, 2, 3, 2, 3]]),
        torch.tensor([1, 2, 1, 4]),
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([2, 2]),
        torch.ones(2),
        Segments([0, 2, 4], [2, 2, 2], [-1, 0, 0]),
    )


@pytest.mark.parametrize(
    "head", [AnalyticHead(), GenericHead(vocabulary=V), KeepHead(), FullHead()], ids=repr
)
def test_a_position_may_predict_several_tokens(head: Head) -> None:
    model, micro = built("Llama"), shared()
    logits = model(**micro.inputs).logits[0]
    rows = logits[micro.selected].log_softmax(-1)
    found = head(model, micro, EVERYTHING)
    torch.testing.assert_close(found.logp, rows.gather(1, micro.targets[:, None])[:, 0])


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_of_the_body_keep_the_fused_head(merged: bool) -> None:
    model = get_peft_model(built("Llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    if merged:
        model = model.merge_and_unload().requires_grad_()
    head, told = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, AnalyticHead) and told is None
    assert_right(model.eval(), head, tolerance=2e-5)


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}],
)
def test_an_adapted_head_computes_its_own_logits(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = get_peft_model(built("Llama"), LoraConfig(init_lora_weights=False, **options)).eval()
    head, told = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, GenericHead) and told is None
    assert_right(model, head, tolerance=2e-5)


# Odd models


class Odd(transformers.LlamaForCausalLM):
    """A Llama whose logits are changed in a way that its configuration does not tell."""

    def change(self, logits: Tensor) -> Tensor:
        return logits * 1.5

    def forward(self, *args: Any, **given: Any) -> Any:
        output = super().forward(*args, **given)
        output.logits = self.change(output.logits)
        return output


class Bounded(Odd):
    def change(self, logits: Tensor) -> Tensor:
        return 100 * torch.tanh(logits / 100)


class Masked(Odd):
    def change(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([0]), -1e4)


class Shifted(Odd):
    def change(self, logits: Tensor) -> Tensor:
        return logits + torch.linspace(0, 1, V)


class Deaf(Odd):
    """Ignores `logits_to_keep`."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **given: Any) -> Any:
        return super().forward(*args, **given)


class Untold(Odd):
    """Has no such argument."""

    def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)


class Wrong(Odd):
    """Does something else with selected positions."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **given: Any) -> Any:
        output = super().forward(*args, logits_to_keep=logits_to_keep, **given)
        if isinstance(logits_to_keep, Tensor):
            output.logits = output.logits * 1.1
        return output


class Unnamed(transformers.LlamaForCausalLM):
    """Names no head; it applies its weight where no hook sees it."""

    def get_output_embeddings(self) -> None:
        return None


class Hidden(transformers.LlamaForCausalLM):
    """Changes the hidden states between its decoder and its head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.Linear(16, 16)

    def forward(self, *args: Any, logits_to_keep: Any = 0, **given: Any) -> Any:
        hidden = self.extra(self.model(*args, **given)[0])
        chosen = hidden[logits_to_keep] if isinstance(logits_to_keep, Tensor) else hidden
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(chosen))


def odd(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**{**SMALL, **options})).eval()


@pytest.mark.parametrize("kind", [Odd, Bounded, Masked, Shifted, Unnamed, Hidden])
@pytest.mark.parametrize("spread", [0.5, 0.02])
def test_unknown_tails_are_left_to_the_model(kind: Any, spread: float) -> None:
    model = odd(kind, initializer_range=spread)
    head, told = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, KeepHead)
    assert "logits are left to the model" in told
    assert_right(model, head)


@pytest.mark.parametrize(
    ("kind", "why"), [(Deaf, "ignores `logits_to_keep`"), (Untold, "logits_to_keep"), (Wrong, "differ by")]
)
def test_models_that_do_not_select_compute_everything(kind: Any, why: str) -> None:
    model = odd(kind).train()
    head, told = choose_head(model, PROBE, 1e-4)
    assert isinstance(head, FullHead) and head.full
    assert "all logits are computed" in told and why in told
    assert model.training
    assert_right(model.eval(), head)


def test_a_probe_that_can_tell_nothing_is_refused() -> None:
    with pytest.raises(StageError, match="needs supervised tokens"):
        choose_head(tiny_llama(V), padded(([3, 4], [])), 1e-4)
    broken = tiny_llama(V)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(StageError, match="not finite"):
        choose_head(broken, PROBE, 1e-4)


def test_budgets_bound_logits_where_the_head_does_not() -> None:
    model, memory = tiny_llama(V), 5 * V * 4
    for head, tokens, supervised in [
        (AnalyticHead(), 100, None),
        (GenericHead(), 100, None),
        (KeepHead(), 100, 5),
        (FullHead(), 5, None),
    ]:
        budget = budget_of(model, head, 100, memory)
        assert (budget.tokens, budget.supervised) == (tokens, supervised)


# Wrappers and precision


def test_forwards_are_put_back() -> None:
    model = tiny_llama(V)
    AnalyticHead()(model, PROBE, Wanted())
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)

    def mine(*_: Any) -> None:
        return None

    model.forward = mine
    with pytest.raises(KeyError), forward_as(model, lambda own: None):
        raise KeyError
    assert model.forward is mine


def test_hooks_of_model_decoder_and_head_run() -> None:
    model, seen = tiny_llama(V), []
    for module in (model, model.model, model.lm_head):
        module.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    AnalyticHead()(model, PROBE, Wanted())
    assert seen == ["LlamaModel", "Linear", "LlamaForCausalLM"]


def test_data_parallel_models_reduce_their_gradients(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = built("Llama", tie_word_embeddings=True)
        wrapped = nn.parallel.DistributedDataParallel(model)
        reduced: list[int] = []

        # DDP compares annotations with types, and ours are strings.
        def communicate(_, bucket):  # type: ignore[no-untyped-def]
            reduced.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, communicate)
        head, told = choose_head(wrapped, PROBE, 1e-4)
        assert isinstance(head, AnalyticHead) and told is None
        plain = torch.autograd.grad(total(expected(model, PROBE)), list(model.parameters()))
        total(head(wrapped, PROBE, EVERYTHING)).backward()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-5)
        assert sum(reduced) == sum(parameter.numel() for parameter in model.parameters())
        total(head(wrapped, EMPTY, EVERYTHING)).backward()
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_heads_are_gathered_for_the_fused_head(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = built("Llama")
        plain = torch.autograd.grad(total(expected(model, PROBE)), list(model.parameters()))
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module)
        assert isinstance(model.lm_head.weight, DTensor)
        head, told = choose_head(model, PROBE, 1e-4)
        assert isinstance(head, AnalyticHead) and told is None
        total(head(model, PROBE, EVERYTHING)).backward()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient, atol=1e-4, rtol=1e-5)
        total(head(model, EMPTY, EVERYTHING)).backward()
    finally:
        torch.distributed.destroy_process_group()


def test_gradient_checkpointing_of_the_body_changes_nothing() -> None:
    model = built("Llama").train()
    model.activation_checkpointing_enable()
    assert_right(model, AnalyticHead())


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_autocast_agrees_with_the_plain_model_under_autocast(name: str) -> None:
    model = MODELS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head, told = choose_head(model, PROBE, 0.05)
    assert isinstance(head, AnalyticHead) and told is None


def test_a_bfloat16_model_with_an_unknown_factor_is_not_taken_for_a_plain_one() -> None:
    model = odd(Odd, initializer_range=0.002).bfloat16()
    head, _ = choose_head(model, PROBE, 0.05)
    assert isinstance(head, KeepHead)
