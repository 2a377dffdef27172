"""Tiny models and tokenizers, made on the fly: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact, Manifest
from posttrain_plugins.models.policy import save_policy
from posttrain_plugins.models.vocabulary import SPECIAL, character_tokenizer, write_tokenizer
from posttrain_plugins.templates.library import chatml

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?+-=*/'\n"
"""What the character tokenizer knows."""
PAD_ID, UNK_ID, START_ID, END_ID = range(len(SPECIAL))


def tiny_llama(vocab: int, *, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A Llama of two layers of width 16 in float32, in evaluation mode; `options` override the config."""
    made: LlamaForCausalLM = _made(LlamaForCausalLM, vocab, seed, options)
    return made


def tiny_judge(
    vocab: int, *, kind: Kind = Kind.REWARD_MODEL, seed: int = 0, **options: Any
) -> LlamaForSequenceClassification | LlamaForTokenClassification:
    """The same Llama with a head that gives numbers: rewards, or log-odds of steps.

    Its weights are larger: with small ones, two answers to one prompt have nearly the same gradient, and little more
    than rounding is left of their difference.
    """
    shape, outputs = _JUDGES[kind]
    sizes = {"num_labels": outputs, "initializer_range": 0.2, **options}
    made: LlamaForSequenceClassification | LlamaForTokenClassification = _made(shape, vocab, seed, sizes)
    return made


_JUDGES: Mapping[Kind, tuple[type[Any], int]] = {
    Kind.REWARD_MODEL: (LlamaForSequenceClassification, 1),
    Kind.PROCESS_REWARD_MODEL: (LlamaForTokenClassification, 2),
}


def _made(shape: type[Any], vocab: int, seed: int, options: Mapping[str, Any]) -> Any:
    chosen = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        **options,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return shape(LlamaConfig(vocab_size=vocab, **chosen)).eval()


def char_tokenizer(directory: Path, alphabet: str = ALPHABET, template: str | None = "chatml") -> Tokenizer:
    """Write a character tokenizer's files; `template` is a jinja source, `chatml`, or None for none at all."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer([alphabet])
    write_tokenizer(directory, tokenizer, chatml() if template == "chatml" else template)
    return tokenizer


def save_tiny_model(
    directory: Path,
    *,
    alphabet: str = ALPHABET,
    template: str | None = "chatml",
    seed: int = 0,
    **options: Any,
) -> PolicyFacts:
    """Write a complete model directory with a character tokenizer and return its facts."""
    source = directory / "tokenizer-source"
    tokenizer = char_tokenizer(source, alphabet, template)
    model = tiny_llama(tokenizer.get_vocab_size(), seed=seed, **options)
    facts = save_policy(directory, model, source)
    for path in sorted(source.iterdir()):
        path.unlink()
    source.rmdir()
    return facts


def as_artifact(directory: Path, facts: Any, kind: Kind = Kind.MODEL) -> Artifact:
    """Wrap a directory as an artifact without a store; its digest covers kind and facts alone."""
    manifest = Manifest(kind=kind, facts=facts, files=())
    return Artifact(manifest.digest, manifest, directory)
