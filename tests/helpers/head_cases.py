"""Models and positions that heads are compared on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.head import (
    Head,
    TokenScores,
    Wanted,
    unwrapped,
)
from posttrain_plugins.training.microbatch import MicroBatch

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
