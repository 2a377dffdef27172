import pytest
import torch
from helpers.laid_out import VOCABULARY, build, example, gemma3, llama, mistral

from posttrain.errors import StageError
from posttrain_plugins.training.layouts import LAYOUTS, choose_layout

PAIRS = [example(40, (3, 4), row=row) for row in range(3)]
SINGLES = [example(5, (4 + 9 * row,), row=row) for row in range(4)]
EVEN = [example(8, (8,), row=row) for row in range(4)]


@pytest.mark.parametrize(
    ("examples", "name"),
    [(PAIRS, "shared_prefix"), (SINGLES * 20, "packed"), (EVEN, "padded"), ([], "padded")],
    ids=["pairs", "ragged", "even", "none"],
)
def test_the_cheapest_is_chosen(examples, name):
    model = build(llama)
    layout, told = choose_layout(model, [examples], examples[:2], 1e-4)
    assert (layout.name, told) == (name, None)
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == ("sdpa" if name == "padded" else "posttrain_sdpa")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("config", [mistral, gemma3], ids=lambda config: config.__name__)
def test_a_layout_may_be_named(name, config):
    layout, told = choose_layout(build(config), [EVEN], EVEN[:1], 1e-4, name)
    assert (layout.name, told) == (name, None)


def mix(module, given, output):
    """Add what the token before is, as a convolution would."""
    return output + output.roll(1, dims=1) * (torch.arange(output.shape[1]) > 0)[:, None]


def test_a_model_that_mixes_tokens_otherwise_gets_padded_rows():
    model = build(llama)
    model.model.layers[0].mlp.register_forward_hook(mix)
    layout, told = choose_layout(model, [PAIRS], PAIRS[:2], 1e-4)
    assert layout.name == "padded"
    assert "`shared_prefix` would be cheaper" in told and "other means than attention" in told
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(StageError, match="`packed` is not exact for this model"):
        choose_layout(model, [PAIRS], PAIRS[:2], 1e-4, "packed")


def recurrent():
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1, num_attention_heads=2
    )


def with_own_attention():
    from transformers import FalconConfig

    return FalconConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    ("config", "implementation"),
    [(recurrent, "eager"), (with_own_attention, "sdpa")],
    ids=["mamba", "falcon"],
)
def test_other_architectures_get_padded_rows(config, implementation):
    layout, told = choose_layout(build(config, implementation), [PAIRS], PAIRS[:1], 1e-4)
    assert layout.name == "padded" and "not exact for this model" in told


def test_without_a_token_to_predict_nothing_is_taken_for_exact():
    lone = [example(0, (1,))]
    assert choose_layout(build(llama), [PAIRS], lone, 1e-4)[0].name == "padded"


def test_no_such_layout():
    with pytest.raises(StageError, match="no such layout"):
        choose_layout(build(llama), [PAIRS], PAIRS, 1e-4, "tree")
