"""Model directories and rows of a scenario, the same for every side. Made once and kept by content."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scenarios import Lengths, Scenario, Shape

SEED = 42
FORMATS = {"sft": "prompt_completion", "dpo": "preference"}


def rows(scenario: Scenario, objective: str, count: int) -> list[dict[str, str]]:
    """Draw rows of random words; each word is one token, and an end token closes every answer."""
    source = random.Random(f"{scenario.name}:{objective}:{SEED}")
    words = scenario.model.vocabulary - 4

    def text(lengths: Lengths, spared: int) -> str:
        drawn = round(lengths.median * source.lognormvariate(0.0, lengths.spread))
        size = min(max(drawn, lengths.least), lengths.most) - spared
        return " ".join(f"w{source.randrange(words)}" for _ in range(size))

    def row() -> dict[str, str]:
        prompt = text(scenario.prompt, 0)
        if objective == "sft":
            return {"prompt": prompt, "completion": " " + text(scenario.answer, 1)}
        return {"prompt": prompt, **{side: " " + text(scenario.answer, 1) for side in ("chosen", "rejected")}}

    return [row() for _ in range(count)]


def read_rows(job: Mapping[str, Any]) -> list[dict[str, str]]:
    """Read the rows of a job, as many as it asks for."""
    with Path(job["rows"]).open() as lines:
        return [json.loads(line) for line in itertools.islice(lines, job["count"])]


def model_directory(shape: Shape, cache: Path) -> Path:
    """Make the model's files, unless they are there."""
    digest = hashlib.sha256(json.dumps([shape.__dict__, SEED, 1], sort_keys=True).encode()).hexdigest()[:16]
    directory = cache / f"model-{digest}"
    if not directory.exists():
        fresh = cache / f"model-{digest}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _write_model(shape, fresh)
        fresh.rename(directory)
    return directory


def _write_model(shape: Shape, directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain_plugins.models.vocabulary import PAD, SPECIAL, UNKNOWN, write_tokenizer

    words = [*SPECIAL, *(f"w{number}" for number in range(shape.vocabulary - len(SPECIAL)))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    write_tokenizer(directory, tokenizer, None)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[SPECIAL[-1]],
        pad_token_id=vocabulary[PAD],
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def encoded(directory: Path, objective: str, given: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Tokenize rows with posttrain's encoder, so that TRL trains on the very same tokens and labels."""
    from posttrain_plugins.templates.encoder import Encoder

    encoder = Encoder.open(directory)
    for row in given:
        if objective == "sft":
            tokens, labels = _labelled(encoder.encode_pair(row["prompt"], row["completion"]))
            yield {"input_ids": tokens, "labels": labels, "length": len(tokens)}
            continue
        sides = {
            side: encoder.encode_pair(row["prompt"], row[side]).tokens for side in ("chosen", "rejected")
        }
        prompt = encoder.encode_prompt(row["prompt"])
        found = {f"{side}_ids": tokens[len(prompt) :] for side, tokens in sides.items()}
        yield {"prompt_ids": prompt, **found, "length": max(map(len, sides.values()))}


def _labelled(example: Any) -> tuple[list[int], list[int]]:
    pairs = zip(example.tokens, example.supervised, strict=True)
    return example.tokens, [token if counts else -100 for token, counts in pairs]
