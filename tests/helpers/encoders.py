"""Encoders of small tokenizers and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.models import ALPHABET, char_tokenizer

from posttrain_plugins.templates.encoder import Encoded, Encoder

ASK = [{"role": "user", "content": "hi"}]


def opened(directory: Path, template: str | None = "chatml", **config: Any) -> Encoder:
    char_tokenizer(directory, ALPHABET + "<>|_", template)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Encoder.open(directory)


def marked(encoder: Encoder, encoded: Encoded) -> str:
    """The text with its supervised parts in brackets."""
    text, inside = "", False
    for token, counts in zip(encoded.tokens, encoded.supervised, strict=True):
        if counts != inside:
            text += "[" if counts else "]"
            inside = counts
        text += encoder.decode([token], skip_special=False)
    return text + "]" * inside
