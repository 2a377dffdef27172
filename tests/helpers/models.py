"""Tiny models and tokenizers, made on the fly; authors of plugins have them too."""

from __future__ import annotations

from posttrain_plugins.testing.models import (
    ALPHABET,
    END_ID,
    PAD_ID,
    START_ID,
    UNK_ID,
    as_artifact,
    char_tokenizer,
    save_tiny_model,
    tiny_judge,
    tiny_llama,
)

__all__ = [
    "ALPHABET",
    "END_ID",
    "PAD_ID",
    "START_ID",
    "UNK_ID",
    "as_artifact",
    "char_tokenizer",
    "save_tiny_model",
    "tiny_judge",
    "tiny_llama",
]
