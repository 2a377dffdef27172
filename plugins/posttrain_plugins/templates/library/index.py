"""Which templates there are, which control tokens they write and how they end an assistant's turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from posttrain.errors import SpecError
from posttrain.wording import did_you_mean, listed

TemplateName = Literal[
    "alpaca",
    "chatml",
    "deepseek-r1",
    "gemma",
    "harmony",
    "llama-2",
    "llama-3",
    "llama-3.1",
    "mistral-tekken",
    "mistral-v1",
    "mistral-v3",
    "phi-3",
    "phi-4",
    "qwen-2.5",
    "qwen-3",
    "vicuna",
    "zephyr",
]
"""The names, as options list them."""


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template of the library.

    Args:
        name: Its name.
        source: The jinja2 source.
        tokens: Control tokens that it writes around turns; each must be one token, or a tokenizer breaks the turns.
        summary: What it is, in one line.
        ends: The control tokens that close an assistant's turn; none when the tokenizer's `eos_token` does.
    """

    name: str
    source: str
    tokens: tuple[str, ...]
    summary: str
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    summary: str
    tokens: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    file: str | None = None
    changes: tuple[tuple[str, str], ...] = ()


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")

_ENTRIES: Mapping[str, _Entry] = {
    "alpaca": _Entry("Alpaca: a preamble and paragraphs headed Instruction and Response"),
    "chatml": _Entry("ChatML: roles between `<|im_start|>` and `<|im_end|>`", _CHATML, ("<|im_end|>",)),
    "deepseek-r1": _Entry(
        "DeepSeek R1: reasoning that the prompt opens, tool calls", _DEEPSEEK, ("<｜end▁of▁sentence｜>",)
    ),
    "gemma": _Entry(
        "Gemma 1 to 3: user and model take turns", ("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",)
    ),
    "harmony": _Entry(
        "Harmony (gpt-oss): channels for reasoning, tool calls and answers",
        _HARMONY,
        ("<|return|>", "<|call|>"),
    ),
    "llama-2": _Entry("Llama 2: `[INST]` as plain text, system message in `<<SYS>>`"),
    "llama-3": _Entry("Llama 3: a header a turn", _LLAMA, ("<|eot_id|>",)),
    "llama-3.1": _Entry(
        "Llama 3.1 to 3.3: headers, the date, tools, JSON tool calls", _LLAMA, ("<|eot_id|>",)
    ),
    "mistral-tekken": _Entry(
        "Mistral, third version without spaces (Nemo, Tekken tokenizers): tools, tool calls",
        _MISTRAL,
        file="mistral-v3",
        changes=(("mistral-v3", "mistral-tekken"), ("set gap = ' '", "set gap = ''")),
    ),
    "mistral-v1": _Entry("Mistral and Mixtral, first version: `[INST]` as plain text"),
    "mistral-v3": _Entry("Mistral, third version (7B v0.3, Mixtral 8x22B): tools, tool calls", _MISTRAL),
    "phi-3": _Entry(
        "Phi 3 and 3.5: a token a role", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|end|>",)
    ),
    "phi-4": _Entry("Phi 4: ChatML with `<|im_sep|>`", (*_CHATML, "<|im_sep|>"), ("<|im_end|>",)),
    "qwen-2.5": _Entry("Qwen 2.5: ChatML with Hermes tool calls", _CHATML, ("<|im_end|>",)),
    "qwen-3": _Entry("Qwen 3: ChatML with reasoning and Hermes tool calls", _CHATML, ("<|im_end|>",)),
    "vicuna": _Entry("Vicuna 1.1: a preamble, `USER:` and `ASSISTANT:`"),
    "zephyr": _Entry("Zephyr: `<|role|>` as plain text on a line of its own"),
}


class _Library(Mapping[str, NamedTemplate]):
    """The templates by name, each read when it is asked for."""

    def __getitem__(self, name: str) -> NamedTemplate:
        return _read(name, _ENTRIES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)


TEMPLATES: Mapping[str, NamedTemplate] = _Library()
"""Every template of the library, by name."""


def named_template(name: str) -> NamedTemplate:
    """Return the template with a name.

    Raises:
        SpecError: There is none.
    """
    if name in _ENTRIES:
        return TEMPLATES[name]
    raise SpecError(
        f"there is no chat template `{name}`",
        expected=listed(_ENTRIES),
        fix=did_you_mean(name, _ENTRIES) or "for a template of your own, give a path that ends in `.jinja`",
    )


@cache
def _read(name: str, entry: _Entry) -> NamedTemplate:
    source = (Path(__file__).parent / f"{entry.file or name}.jinja").read_text(encoding="utf-8")
    for old, new in entry.changes:
        source = source.replace(old, new)
    return NamedTemplate(name, source, entry.tokens, entry.summary, entry.ends)
