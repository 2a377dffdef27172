"""Small models and files to look at, without weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from helpers.tokenizers_of_all_kinds import write

from posttrain_plugins.inspection.views import Look, Side

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> [red]x[/red] [bold] "
    "\x1b[31mESC \x1b]0;owned\x07 \u202eRTL\u202c \x00NUL \x9b32m CSI </pre></style>&amp; שלום مرحبا 👩‍🚀"
)
"""Text that would act on a terminal, on a page, or on rich's markup."""


def model_at(directory: Path, kind: str = "byte-level", *, bos: bool = False, context: int = 4096) -> Path:
    """Write a model directory with a ChatML template."""
    write(directory, kind, CHATML, ("<|im_start|>", "<|im_end|>"), bos=bos, eos="<|im_end|>")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return directory


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shown(side: Side, look: Look) -> str:
    """The characters of a side that look so."""
    return "".join(piece.text for piece in side.pieces if piece.look is look)
