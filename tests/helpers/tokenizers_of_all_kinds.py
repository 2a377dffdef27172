"""Tokenizers of the kinds that models have, trained on the spot, with a template's control tokens as single tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It said: look it up!\n\nuser assistant system tool word name",
    "привет как дела что нового да и что еще",
    "καλημέρα σου τίποτα ναι όχι μισό εντάξει τέλος σωστά σκέφτομαι πολύ όλα πάλι λόγος άλφα βήτα",
    "բարեւ ձեզ გამარჯობა ერთი ორი שלום مرحبا 🌍 👍",
] * 4


def byte_level() -> Tokenizer:
    """GPT-2's kind: byte-level BPE with its regular expression."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    """Llama 2's kind: BPE over text whose spaces are ▁, one of which is put before it, with bytes to fall back to."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's kind: a unigram model with a Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: WordPiece, which loses spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "metaspace-bpe": metaspace_bpe,
    "unigram": unigram,
    "word-piece": word_piece,
}


def write(
    directory: Path,
    kind: str,
    template: str,
    controls: Collection[str],
    *,
    bos: bool = True,
    eos: str,
    kinds: Mapping[str, Callable[[], Tokenizer]] = KINDS,
) -> Path:
    """Write a model directory without weights: a tokenizer with its control tokens, and a chat template.

    Args:
        directory: Where to.
        kind: One of `kinds`.
        template: The chat template.
        controls: Tokens that it writes.
        bos: Put a `<s>` before every text, as Llama's tokenizers do.
        eos: The end-of-sequence token.
        kinds: What makes a tokenizer, by its name.
    """
    tokenizer = kinds[kind]()
    tokens = list(dict.fromkeys(["<s>", eos, *controls]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    if bos:
        first = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", first)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
