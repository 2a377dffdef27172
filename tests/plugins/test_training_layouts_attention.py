import json
from copy import deepcopy

import pytest
import torch
from helpers.laid_out import (
    MODELS,
    alone,
    build,
    example,
    gemma3,
    gradient,
    llama,
    logp,
    mistral,
    qwen2,
    ragged,
)

from posttrain.errors import StageError
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.layouts import blocks as blocks_module

ROWS = [LAYOUTS["packed"], LAYOUTS["shared_prefix"]]
IDS = [f"{config.__name__}-{name}" for config, name in MODELS]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Cut segments of these tests as those of 128 tokens are."""
    monkeypatch.setattr(blocks_module, "PIECE", 5)


@pytest.mark.parametrize(("config", "implementation"), MODELS, ids=IDS)
def test_sequences_are_as_if_alone(config, implementation):
    examples = ragged()
    model = build(config, implementation)
    expected = alone(model, examples)
    slope = gradient(model, expected)
    assert expected.std() > 1
    for recompute in (False, True):
        if recompute:
            model.activation_checkpointing_enable()
        for layout in LAYOUTS.values():
            found = logp(model, layout, examples)
            assert (found - expected).detach().abs().max() < 1e-5, layout.name
            difference = (gradient(model, found) - slope).abs().max() / slope.abs().max()
            assert difference < 1e-5, (layout.name, recompute)
    model.eval()
    with torch.no_grad():
        for layout in ROWS:
            assert (logp(model, layout, examples) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("config", [llama, mistral, gemma3], ids=lambda config: config.__name__)
def test_a_wrong_mask_would_show(config):
    """Without the context a shared prefix is read as one long sequence, windows count indices."""
    examples = ragged()
    model = build(config).eval()
    layout = LAYOUTS["shared_prefix"]
    micro = layout.arrange(examples, 0, "cpu")
    with torch.no_grad():
        logits = model(**micro.inputs).logits.flatten(0, 1)[micro.selected].log_softmax(-1)
        found = logits.gather(1, micro.targets[:, None])[:, 0]
        assert (found - alone(model, examples)).abs().max() > 0.1


def test_a_window_matters_here():
    narrow, wide = build(mistral).eval(), build(mistral).eval()
    wide.config.sliding_window = None
    with torch.no_grad():
        assert (alone(narrow, ragged()) - alone(wide, ragged())).abs().max() > 0.1


def test_recomputing_with_reentrant_checkpoints():
    examples, model = ragged(), build(mistral)
    slope = gradient(model, alone(model, examples))
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    for layout in ROWS:
        found = gradient(model, logp(model, layout, examples))
        assert (found - slope).abs().max() < 1e-5 * slope.abs().max()


def test_pairs_that_begin_alike():
    pair = example(6, (1, 1), seed=3)
    tokens = [*pair.sequences[0].tokens[:6], 7, 8, 9]
    first, second = pair.sequences
    first = type(first)([*tokens, 10], [False] * 6 + [True] * 4, "chosen")
    second = type(first)([*tokens, 11, 12], [False] * 6 + [True] * 5, "rejected")
    examples = [type(pair)(0, (first, second))]
    model = build(gemma3)
    slope = gradient(model, alone(model, examples))
    found = gradient(model, logp(model, LAYOUTS["shared_prefix"], examples))
    assert LAYOUTS["shared_prefix"].size(examples) == 9 + 1 + 2
    assert (found - slope).abs().max() < 1e-5 * slope.abs().max()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_a_row_nothing_changes(implementation):
    model = build(mistral, implementation).eval()
    stock = deepcopy(model)
    logp(model, LAYOUTS["packed"], ragged())
    assert model.config._attn_implementation == f"posttrain_{implementation}"
    tokens = torch.arange(18).view(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for given in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            assert torch.equal(model(tokens, **given).logits, stock(tokens, **given).logits)
    written = [
        each.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        for each in (model, stock)
    ]
    assert torch.equal(*written)


def test_the_implementation_is_not_saved(tmp_path):
    model = build(llama)
    logp(model, LAYOUTS["packed"], ragged())
    model.save_pretrained(tmp_path)
    assert "posttrain" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_gradients_are_bitwise_reproducible():
    model, examples = build(llama), ragged()
    torch.use_deterministic_algorithms(True)
    try:
        one, other = (gradient(model, logp(model, LAYOUTS["shared_prefix"], examples)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(one, other)


def test_attention_dropout_is_passed_on():
    model = build(llama)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        one, other = (logp(model, LAYOUTS["packed"], ragged()) for _ in range(2))
    assert not torch.equal(one, other)


def test_bfloat16_autocast():
    model, examples = build(mistral).eval(), ragged()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = alone(model, examples)
        for layout in ROWS:
            assert (logp(model, layout, examples) - expected).abs().mean() < 0.05


def test_adapters_and_wrappers():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(qwen2), LoraConfig(target_modules=["q_proj", "v_proj"]))
    examples = ragged()
    for layout in ROWS:
        assert (logp(model, layout, examples) - alone(model, examples)).detach().abs().max() < 1e-5


def test_a_model_with_a_mask_of_its_own_is_refused():
    model = build(llama)
    micro = LAYOUTS["packed"].arrange(ragged(), 0, "cpu")
    own = torch.zeros(1, 1, *2 * [micro.tokens.shape[1]])
    with LAYOUTS["packed"].attending(model, micro), pytest.raises(StageError, match="makes its own mask"):
        model(**micro.inputs, attention_mask=own)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_chunk_size": 4}, "chunked_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_kinds_of_layers_that_see_otherwise_are_refused(changes, reason):
    model = build(llama)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(StageError, match=reason):
        logp(model, LAYOUTS["packed"], ragged())


def test_flash_attention_takes_packed_rows_by_their_positions():
    model = build(llama)
    model.config._attn_implementation_internal = "flash_attention_2"
    micro = LAYOUTS["packed"].arrange(ragged(), 0, "cpu")
    with LAYOUTS["packed"].attending(model, micro):
        assert model.config._attn_implementation == "flash_attention_2"
    with (
        pytest.raises(StageError, match="knows nothing of shared prefixes"),
        LAYOUTS["shared_prefix"].attending(model, micro),
    ):
        pass
