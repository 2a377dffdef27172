"""A fixed probe: what a model says about a few conversations and about tokens at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.errors import DataError
from posttrain_plugins.models.mode import evaluating

if TYPE_CHECKING:
    from posttrain_plugins.templates.encoder import Encoder

LENGTH = 128
"""Tokens of a probe at most."""
_RANDOM, _TOKENS = 2, 32
_TEXTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    (
        "Write a function that adds two numbers.",
        "```python\ndef add(a: int, b: int) -> int:\n    return a + b\n```\nIt returns the sum, 3 for `add(1, 2)`.",
    ),
    ("Übersetze ins Deutsche: good morning, my friend!", "Guten Morgen, mein Freund!"),
)


def probe_of(encoder: Encoder, context: int | None = None) -> list[list[int]]:
    """Return sequences of tokens: conversations as the chat template shows them, and ids at random.

    Args:
        encoder: The policy's tokenizer and chat template; without a template the texts are taken as they are.
        context: Longest sequence that the model takes.
    """
    longest = min(LENGTH, context or LENGTH)
    written = [tokens[:longest] for tokens in map(lambda turns: _written(encoder, *turns), _TEXTS) if tokens]
    special = sorted(
        token for token in encoder.files.plain.get_added_tokens_decoder() if token < encoder.vocabulary
    )
    plain = sorted(set(range(min(encoder.vocabulary, encoder.files.reachable))) - set(special))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(plain), (_RANDOM, min(_TOKENS, longest)), generator=generator)
    return [*written, *([plain[place] for place in row] for row in chosen.tolist())]


def logits_of(model: Any, probe: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits of each sequence, shape [tokens, vocabulary], float32, on the CPU."""
    device = next(model.parameters()).device
    with evaluating(model):
        return [
            model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0].float().cpu()
            for tokens in map(list, probe)
        ]


def gap(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest difference of a logit; infinite where one is not a number."""
    largest = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    return largest if largest == largest else float("inf")


def agreement(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the share of places at which both have the same most likely token."""
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(one, other, strict=True)])
    return float(same.float().mean())


def size(logits: Sequence[Tensor]) -> float:
    """Return the largest logit, in absolute value."""
    return max(float(each.abs().max()) for each in logits)


def _written(encoder: Encoder, asked: str, answer: str) -> list[int]:
    plain = encoder.encode_text(f"{asked}\n{answer}").tokens
    if not encoder.has_template:
        return plain
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    try:
        return encoder.encode_messages(turns).tokens
    except DataError:
        # A template that wants turns of another form says nothing against the weights.
        return plain
