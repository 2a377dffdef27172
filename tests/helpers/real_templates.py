"""Chat templates of real models, as TRL's wheel has them, and readers for them with a small tokenizer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files

from helpers.conversations import Sample
from tokenizers import Tokenizer

from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.models.vocabulary import bpe_tokenizer
from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.encoder import CLOCK
from posttrain_plugins.templates.moulds import Moulds
from posttrain_plugins.templates.reader import Reader
from posttrain_plugins.templates.reading import Reading
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.tokenizer import TokenizerFiles

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_TOKEN = re.compile(r"<[|｜/a-zA-Z_▁][^<>\n'{}\s]{0,40}?>|\[/?[A-Z_]{3,}\]")
_TAG = re.compile(r"</?[A-Za-z_]+>")
_ENDS = ("</s>", "<s>", "<end_of_turn>", "<start_of_turn>", "<end_of_utterance>")
_BUILT = tuple(f"<|{role}|>" for role in ("user", "assistant", "system", "tool", "observation"))


def names(training: bool) -> list[str]:
    """The templates; `training` ones mark what is the assistant's."""
    found = sorted(path.name for path in files("trl").joinpath("chat_templates").iterdir())
    stems = [name.removesuffix(".jinja") for name in found if name.endswith(".jinja")]
    return [name for name in stems if name.endswith("_training") == training]


@lru_cache
def source(name: str) -> str:
    """The template of a name."""
    return files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache
def _trained() -> str:
    return str(
        bpe_tokenizer(["Hello zq, this is the answer of the assistant to a user.\n\n" * 20], 420).to_str()
    )


@lru_cache
def tokenizer_files(name: str) -> TokenizerFiles:
    """A byte-level tokenizer to which the tokens that a template writes are atomic; tags are not special."""
    template = source(name)
    tokenizer = Tokenizer.from_str(_trained())
    tokens = {*_TOKEN.findall(template), *_ENDS, *_BUILT}
    tags = sorted(token for token in tokens if _TAG.fullmatch(token) and token not in _ENDS)
    tokenizer.add_special_tokens(sorted(tokens - set(tags)))
    tokenizer.add_tokens(
        [tag for tag in tags if tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return TokenizerFiles(json.loads(tokenizer.to_str()), {}, SPECIAL, template)


@lru_cache
def chat_template(name: str) -> ChatTemplate:
    """The compiled template of a name."""
    return ChatTemplate(source(name), SPECIAL)


def reader(name: str, capacity: int) -> Reader:
    """A reader that remembers so many moulds; with none it traces every conversation."""
    return Reader(chat_template(name), Controls(tokenizer_files(name)), CLOCK, name, Moulds(capacity))


def read(reader: Reader, sample: Sample) -> Reading | str:
    """Return how a conversation reads, or why it is refused."""
    try:
        return reader.read(Passage("completion", None, sample.messages, sample.tools, sample.arguments))
    except DataError as error:
        return error.message
