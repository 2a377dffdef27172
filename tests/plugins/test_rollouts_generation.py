from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from posttrain.errors import DataError, StageError
from posttrain_plugins.rollouts.generation import generate, invert, nucleus

VOCABULARY, STOPS = 61, (1, 5, 7)
PROMPTS = [[10 + i, *range(20, 20 + 2 * i)] for i in range(7)]


def tiny_gpt2(vocab: int) -> GPT2LMHeadModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()


MODELS = {
    "llama": lambda: tiny_llama(VOCABULARY, initializer_range=0.5, max_position_embeddings=64),
    "gpt2": lambda: tiny_gpt2(VOCABULARY),
    "sliding": lambda: sliding(VOCABULARY),
}


def sliding(vocab: int) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=5, initializer_range=0.5,
            max_position_embeddings=64,
        )  # fmt: skip
        return MistralForCausalLM(config).eval()


def policy_of(model: Any, stops: tuple[int, ...] = STOPS) -> Any:
    return SimpleNamespace(model=model, encoder=SimpleNamespace(stop_ids=stops))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_greedy_equals_generate(name: str, batch_tokens: int) -> None:
    model = MODELS[name]()
    found = generate(policy_of(model), PROMPTS, max_new_tokens=20, batch_tokens=batch_tokens)
    ended = 0
    for prompt, (only,) in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=20, eos_token_id=list(STOPS), pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        finished = expected[-1] in STOPS
        assert only.finished == finished
        assert only.tokens == (expected[:-1] if finished else expected)
        ended += finished
    assert 0 < ended < len(PROMPTS), "the models of this test must end some answers and not others"


@pytest.mark.parametrize("name", MODELS)
def test_samples_do_not_depend_on_batching_nor_on_their_number(name: str) -> None:
    policy = policy_of(MODELS[name]())
    options = {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    alone = generate(policy, PROMPTS, samples=3, batch_tokens=1, **options)
    together = generate(policy, PROMPTS, samples=3, batch_tokens=100_000, **options)
    fewer = generate(policy, PROMPTS, samples=2, **options)
    assert alone == together
    assert [group[:2] for group in alone] == fewer
    assert [group[0].tokens for group in alone] != [group[1].tokens for group in alone]


def test_another_seed_gives_other_samples() -> None:
    policy = policy_of(MODELS["llama"]())
    one, other = (generate(policy, PROMPTS, max_new_tokens=8, temperature=1.0, seed=seed) for seed in (0, 1))
    assert one != other


def test_samples_follow_the_models_distribution() -> None:
    model = MODELS["llama"]()
    draws = generate(policy_of(model, ()), [[10, 11]], max_new_tokens=1, temperature=1.0, samples=4000)[0]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[10, 11]])).logits[0, -1].double(), -1)
    counts = Counter(draw.tokens[0] for draw in draws)
    found = torch.tensor([counts[token] / 4000 for token in range(VOCABULARY)])
    # A seeded draw: the bound is four standard errors of the most uncertain share, 4 · sqrt(0.25 / 4000).
    assert float((found - expected).abs().max()) < 4 * (0.25 / 4000) ** 0.5


def test_a_stop_at_once_gives_an_empty_finished_answer() -> None:
    model = MODELS["llama"]()
    first = generate(policy_of(model, ()), [[10]], max_new_tokens=1)[0][0].tokens[0]
    (only,) = generate(policy_of(model, (first,)), [[10]], max_new_tokens=5)[0]
    assert (only.tokens, only.finished) == ([], True)


def test_without_stop_ids_every_answer_is_cut_off() -> None:
    found = generate(policy_of(MODELS["llama"](), ()), PROMPTS, max_new_tokens=4)
    assert all(len(only.tokens) == 4 and not only.finished for (only,) in found)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_context_cuts_answers_off(name: str) -> None:
    # One row in nine ends early and stays in the batch, where its positions must not run past the context.
    prompts = [list(range(8, 8 + 50)), *([9 + i] for i in range(8))]
    found = generate(policy_of(MODELS[name](), ()), prompts, max_new_tokens=40)
    assert [len(only.tokens) for (only,) in found] == [14, *[40] * 8]
    with pytest.raises(DataError, match="whole context"):
        generate(policy_of(MODELS[name]()), [[8] * 64], max_new_tokens=1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        generate(policy_of(MODELS["llama"]()), [[8], []], max_new_tokens=1)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(StageError, match="not finite"):
        generate(policy_of(model), [[8]], max_new_tokens=1)


def test_progress_and_mode_are_kept() -> None:
    model = MODELS["llama"]().train()
    seen: list[tuple[int, int]] = []
    generate(
        policy_of(model), PROMPTS, max_new_tokens=2, batch_tokens=1, progress=lambda *step: seen.append(step)
    )
    assert seen == [(done, len(PROMPTS)) for done in range(1, len(PROMPTS) + 1)]
    assert model.training


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64)
    kept = nucleus(probabilities, 0.7)
    assert kept.tolist() == [[0.0, 0.5, 0.0, 0.25], [0.97, 0.0, 0.0, 0.0]]
    assert nucleus(probabilities, 1.0) is probabilities


def test_nucleus_beyond_the_first_candidates_and_with_ties() -> None:
    flat = torch.full((1, 3000), 1 / 3000, dtype=torch.float64)
    assert torch.equal(nucleus(flat, 0.9), flat)
    falling = torch.arange(3000, 0, -1, dtype=torch.float64)[None] / (3000 * 3001 / 2)
    kept = int((nucleus(falling, 0.9) > 0).sum())
    assert float(falling[0, : kept - 1].sum()) < 0.9 <= float(falling[0, :kept].sum())


def test_inversion_picks_by_cumulated_weight_and_stays_in_the_support() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    uniforms = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    found = [int(invert(weights, torch.tensor([uniform], dtype=torch.float64))) for uniform in uniforms]
    assert found == [1, 1, 3, 3, 4, 4]
    tiny = torch.full((1, 10), 0.1, dtype=torch.float64) * 1e-300
    assert int(invert(tiny, torch.tensor([1 - 2**-53], dtype=torch.float64))) == 9


def test_models_without_a_cache_of_keys_and_values_are_refused() -> None:
    model = MODELS["llama"]()
    model._is_stateful = True
    with pytest.raises(StageError, match="decoder-only"):
        generate(policy_of(model), [[8]], max_new_tokens=1)


def test_progress_is_called_while_a_batch_is_decoded_and_may_stop_it() -> None:
    model = MODELS["llama"]()
    seen: list[tuple[int, int]] = []
    generate(
        policy_of(model, ()),
        PROMPTS,
        max_new_tokens=40,
        batch_tokens=100_000,
        progress=lambda *at: seen.append(at),
    )
    assert seen == [(0, 7), (0, 7), (7, 7)]

    class Stopped(Exception):
        pass

    steps: list[int] = []
    model.register_forward_hook(lambda *_: steps.append(1))

    def stop(done: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        generate(policy_of(model, ()), PROMPTS, max_new_tokens=40, batch_tokens=100_000, progress=stop)
    assert len(steps) <= 16


def test_a_model_that_cannot_select_logits_generates_the_same() -> None:
    model = MODELS["llama"]()
    expected = generate(policy_of(model), PROMPTS, max_new_tokens=8)
    plain = model.forward

    def forward(
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        use_cache: bool = False,
    ) -> Any:
        return plain(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
        )

    model.forward = forward
    assert generate(policy_of(model), PROMPTS, max_new_tokens=8) == expected
