"""Tiny models of several architectures, and examples to lay out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.layouts import Layout
from posttrain_plugins.training.layouts.rows import Padded

VOCABULARY = 61
# Large weights: attention is far from even, so that a token seen wrongly shows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
}
MIXED = {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
WINDOW = 5


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def dynamic() -> Any:
    """Frequencies that change with the longest row of a pass, beyond `max_position_embeddings`."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})


def longrope() -> Any:
    """Two sets of frequencies: for passes with a row beyond half of `max_position_embeddings`, and for others."""
    from transformers import LlamaConfig

    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
    return LlamaConfig(**SIZES, rope_parameters=rope)


def gpt2() -> Any:
    from transformers import GPT2Config

    names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.25, "n_positions": 24}
    return GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **names)


def qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


def mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**SIZES, sliding_window=WINDOW)


def gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**SIZES, **MIXED, attn_logit_softcapping=3.0)


def gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**SIZES, **MIXED)


MODELS = [(config, name) for config in (llama, gpt2, qwen2, mistral, gemma3) for name in ("sdpa", "eager")]
MODELS += [(gemma2, "eager"), (dynamic, "sdpa"), (longrope, "sdpa")]
"""Configurations, and the attention each is tried with: sdpa knows no caps."""


def build(config: Callable[[], Any], implementation: str = "sdpa") -> Any:
    """Make a model in training mode, always the same."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(), attn_implementation=implementation).float().train()


def example(prompt: int, completions: Sequence[int], seed: int = 0, row: int = 0) -> Example:
    """Random tokens: a prompt of some length and completions of others, all of these supervised."""
    generator = np.random.default_rng([seed, row])
    head = generator.integers(0, VOCABULARY, prompt).tolist()
    sequences = []
    for length in completions:
        tokens = [*head, *generator.integers(0, VOCABULARY, length).tolist()]
        sequences.append(
            TokenSequence(tokens, [place >= prompt for place in range(len(tokens))], "completion")
        )
    return Example(row, tuple(sequences), weight=1.0 + row)


def ragged() -> list[Example]:
    """Prompts of 0, 1 and more tokens than a window; 2 to 4 completions, of one token and more."""
    shapes = [(9, (4, 7)), (0, (5, 3)), (1, (1, 1, 6)), (12, (2, 2, 5, 1)), (3, (11,))]
    return [example(prompt, completions, row=row) for row, (prompt, completions) in enumerate(shapes)]


def logp(model: Any, layout: Layout, examples: Sequence[Example]) -> Tensor:
    """Log-probs of the supervised tokens."""
    micro = layout.arrange(examples, 0, "cpu")
    with layout.attending(model, micro):
        logits = model(**micro.inputs).logits
    chosen = logits.flatten(0, 1)[micro.selected].log_softmax(-1)
    return chosen.gather(1, micro.targets[:, None])[:, 0]


def alone(model: Any, examples: Sequence[Example]) -> Tensor:
    """The same, each sequence by itself."""
    singles = [Example(0, (sequence,)) for each in examples for sequence in each.sequences]
    return torch.cat([logp(model, Padded(), [single]) for single in singles])


def gradient(model: Any, values: Tensor) -> Tensor:
    """The gradient of a sum of values that weighs each differently, of all parameters in a row."""
    model.zero_grad()
    torch.autograd.backward((values * torch.linspace(-1, 2, len(values))).sum())
    return torch.cat([each.grad.flatten() for each in model.parameters()])
