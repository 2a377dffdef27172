"""Texts that break things, and random conversations made of them whose characters tell who said them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random

from helpers import tokenizers_of_all_kinds as tokenizers
from helpers.scripts import Message, assistant, system, user
from tokenizers import Tokenizer, normalizers

from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.library import NamedTemplate, named_template

EOS = "</s>"
PIECES = (
    *(
        "\x00",
        "\ufeff",
        "\r\n",
        "\r",
        "\t",
        "\n",
        " ",
        "  ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "\x1b[31m",
    ),
    *(
        "\u202e",
        "שלום",
        "مرحبا",
        "\u202c",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "👍🏽",
        "\u200d",
        "e\u0301",
        "\u0301",
        "\u0338",
        "각",
    ),
    *(
        "\ufffd",
        "\U0010ffff",
        "𝔘",
        "ﬁ",
        "İ",
        "▁",
        "{{ messages }}",
        "{% endfor %}",
        "%s",
        "{}",
        "\\n",
        "&lt;",
    ),
    *("assistant\n", "### Response:", "</think>", "a", "0", "="),
)
"""No piece holds a character of a speaker's script."""
SPELLED = (
    "<s>",
    "</s>",
    "<|im_end|>",
    "<|im_start|>",
    "<unk>",
    "[UNK]",
    "<0x41>",
    "<|eot_id|>",
    "<|end|>",
    "[/INST]",
)
"""What control tokens of one tokenizer or another look like."""
GREEK, CYRILLIC, ARMENIAN = "αβγδε", "абвгд", "աբգդե"


def text(random: Random, script: str, pieces: tuple[str, ...] = PIECES) -> str:
    """A text of some pieces and some letters of a script; now and then it is empty."""
    parts = [
        random.choice(pieces)
        if random.random() < 0.6
        else "".join(random.choices(script, k=random.randint(1, 4)))
        for _ in range(random.randint(0, 5))
    ]
    return "".join(parts)


def conversation(random: Random, pieces: tuple[str, ...] = PIECES) -> list[Message]:
    """A conversation of one to three rounds that may begin with a system message."""
    messages = [system(text(random, ARMENIAN, pieces))] if random.random() < 0.3 else []
    for _ in range(random.randint(1, 3)):
        thought = {"reasoning_content": text(random, GREEK, pieces)} if random.random() < 0.2 else {}
        messages += [
            user(text(random, CYRILLIC, pieces)),
            assistant("α" + text(random, GREEK, pieces), **thought),
        ]
    return messages


NORMALIZERS: Mapping[str, tuple[str, normalizers.Normalizer]] = {
    "composing": ("byte-level", normalizers.NFC()),
    "folding": ("byte-level", normalizers.NFKC()),
    "trimming": ("byte-level", normalizers.Strip()),
    "lower-case": ("word-piece", normalizers.BertNormalizer()),
    "without-accents": (
        "unigram",
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    ),
}


@cache
def _trained(kind: str) -> str:
    base, normalizer = NORMALIZERS.get(kind, (kind, None))
    tokenizer = tokenizers.KINDS[base]()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer.to_str()


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    kind: lambda kind=kind: Tokenizer.from_str(_trained(kind)) for kind in (*tokenizers.KINDS, *NORMALIZERS)
}
"""Tokenizers of all kinds, and some whose texts are longer or shorter than what they were given."""


def ends(template: NamedTemplate) -> tuple[str, ...]:
    """What may close a turn of the assistant."""
    return (*(template.ends or (EOS,)), *(token for token in template.tokens if token == "<|end|>"))


def encoder_of(directory: Path, kind: str, name: str) -> Encoder:
    """Write a tokenizer with a template of the library, and open it."""
    template = named_template(name)
    folder = directory / kind / name
    tokenizers.write(folder, kind, template.source, template.tokens, eos=ends(template)[0], kinds=KINDS)
    return Encoder.open(folder)
