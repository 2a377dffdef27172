"""Heads of odd, wrapped, sharded and rounded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.head_cases import (
    EMPTY,
    EVERYTHING,
    MODELS,
    PROBE,
    SMALL,
    V,
    assert_right,
    built,
    expected,
    padded,
    total,
)
from helpers.models import tiny_llama
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from posttrain.errors import StageError
from posttrain_plugins.training.head import (
    AnalyticHead,
    FullHead,
    GenericHead,
    KeepHead,
    Wanted,
    budget_of,
    choose_head,
)
from posttrain_plugins.training.head.paths import forward_as

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
