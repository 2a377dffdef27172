"""Heads and their choice: every architecture gets scores that equal its own plain logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.head_cases import (
    EMPTY,
    EVERYTHING,
    MODELS,
    PROBE,
    V,
    assert_right,
    built,
    total,
)
from peft import LoraConfig, get_peft_model

from posttrain_plugins.training.head import (
    AnalyticHead,
    FullHead,
    GenericHead,
    Head,
    KeepHead,
    Tail,
    choose_head,
)
from posttrain_plugins.training.microbatch import MicroBatch, Segments


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
