"""Tokenizers made from data, and the files they are kept in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain_plugins.models.artifact import GENERATION, write_config
from posttrain_plugins.templates.library import END_OF_TURN, START_OF_TURN
from posttrain_plugins.templates.tokenizer import TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "<|pad|>"
UNKNOWN = "<|unk|>"
SPECIAL = (PAD, UNKNOWN, START_OF_TURN, END_OF_TURN)
"""Special tokens of a new tokenizer; their ids are their places."""

_ROLES = "\nsystemuserassistant"


def character_tokenizer(
    texts: Iterable[str], special: Sequence[str] = SPECIAL, always: str = _ROLES
) -> Tokenizer:
    """Make a tokenizer of the characters of `texts`, in code-point order after the special tokens.

    Args:
        texts: Their characters are tokens; others become `<|unk|>`.
        special: The special tokens.
        always: Characters that are tokens too, such as those that a chat template writes.
    """
    from tokenizers import Tokenizer, decoders, models

    alphabet = sorted(set(always).union(*texts))
    vocabulary = {token: index for index, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def bpe_tokenizer(texts: Iterable[str], size: int, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `size` tokens.

    Raises:
        DataError: `size` leaves no room for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(special)
    if size < smallest:
        raise DataError(
            f"a byte-level vocabulary of {size} is too small",
            expected=f"at least {smallest}: 256 bytes and {len(special)} special tokens",
            fix="raise `vocab_size`, or use `tokenizer: character`",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, template: str | None, ends: Sequence[str] = (END_OF_TURN,)
) -> None:
    """Write the files of a tokenizer with the special tokens above, its template and generation config.

    Args:
        directory: Where to.
        tokenizer: The tokenizer.
        template: Source of its chat template, or None.
        ends: Tokens that a generation stops at; the first is the end-of-sequence token.
    """
    (directory / TOKENIZER).write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    write_config(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": ends[0],
            "pad_token": PAD,
            "unk_token": UNKNOWN,
        },
    )
    stops = [tokenizer.token_to_id(end) for end in ends]
    ids = {"eos_token_id": stops if len(stops) > 1 else stops[0], "pad_token_id": tokenizer.token_to_id(PAD)}
    write_config(directory / GENERATION, ids)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def text_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from text_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from text_of(item)
