"""Rows as TRL and posttrain prepare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.contexts import catalogue

from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.templates.encoder import Encoder

Labelled = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them are learned; of the first nobody learns anything."""

# Strings

AFFIXES = {"beginning": "<s> $A", "nothing": "$A", "both": "<s> $A </s>"}
"""What a tokenizer puts around a text on its own account."""


def labelled(tokens: Sequence[int], learned: Sequence[Any]) -> Labelled:
    return tuple(tokens), (False, *map(bool, learned[1:]))


def prepared(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    format: str,
    trainer: str = "train.sft",
    **options: Any,
) -> Any:
    options = {"max_length": None, "truncation": "keep_start", "weight_column": None, **options}
    return prepare(catalogue().stage(trainer), rows, Encoder.open(directory), format_of(format), **options)


def sequences(made: Any) -> list[list[Labelled]]:
    return [[labelled(s.tokens, s.supervised) for s in example.sequences] for example in made.examples]
