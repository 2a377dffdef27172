"""An encoder of single letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, Supervise
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.examples import Prepared, prepare
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.sft import Sft


@dataclass(frozen=True)
class Picture:
    start: int
    end: int


class Letters:
    """Encodes a passage letter by letter; upper case in an answer is not supervised, `#` stands for an image."""

    def __init__(self, bos: str | None = None) -> None:
        self.bos_id = None if bos is None else ord(bos)

    def encode(self, passages: Sequence[Passage]) -> list[Any]:
        return [self._one(passage) for passage in passages]

    def _one(self, passage: Passage) -> Any:
        prompt, completion = map(written, (passage.prompt, passage.completion))
        if "!" in prompt:
            return DataError("the template declines")
        text = str(passage.tools or "") + prompt + completion
        tokens = [ord(letter) for letter in text]
        start = len(text) - len(completion)
        return SimpleNamespace(
            tokens=tokens,
            supervised=[i >= start and chr(t).islower() for i, t in enumerate(tokens)],
            straddling="+" in prompt,
            notes=[SimpleNamespace(code="trimmed", message=f"trims {prompt[2:] or 'it'}")] * 2
            if "_" in text
            else [],
            images=tuple(Picture(i, i + 1) for i, letter in enumerate(text) if letter == "#"),
        )


def written(turns: Any) -> str:
    if turns is None or isinstance(turns, str):
        return turns or ""
    return "".join(message["content"] for message in turns)


def prepared(
    rows: Sequence[Mapping[str, Any]],
    max_length: int | None = None,
    truncation: str = "keep_start",
    **more: Any,
) -> Prepared:
    preference = "chosen" in rows[0] if rows else False
    return prepare(
        Dpo() if preference else Sft(),
        rows,
        Letters(more.get("bos")),
        format_of("preference" if preference else more.get("format", "prompt_completion")),
        max_length=max_length,
        truncation=truncation,
        weight_column=more.get("weight_column"),
        supervise=more.get("supervise", Supervise.ANSWERS),
    )


def said(found: Prepared) -> list[str]:
    return [text for _, text in found.notes]


def text(example: Example, side: int = 0) -> str:
    return "".join(map(chr, example.sequences[side].tokens))
