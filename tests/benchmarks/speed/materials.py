"""Model directories and rows of a scenario, the same for every side. Made once and kept by content."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from objectives import OBJECTIVES, OTHER
from scenarios import Lengths, Scenario, Shape

SEED = 42
Row = dict[str, Any]


def rows(scenario: Scenario, objective: str, count: int) -> list[Row]:
    """Draw rows of random words; each word is one token, and an end token closes every answer."""
    known = OBJECTIVES[objective]
    source = random.Random(f"{scenario.name}:{objective}:{SEED}")
    words = scenario.model.vocabulary - 4

    def text(lengths: Lengths, spared: int) -> str:
        drawn = round(lengths.median * source.lognormvariate(0.0, lengths.spread))
        size = min(max(drawn, lengths.least), lengths.most) - spared
        return " ".join(f"w{source.randrange(words)}" for _ in range(size))

    def row() -> Row:
        drawn: Row = {"prompt": text(scenario.prompt, 0)}
        drawn |= {side: " " + text(scenario.answer, 1) for side in known.learned}
        return drawn | {"label": source.random() < 0.5} if known.measured else drawn

    return [row() for _ in range(count)]


def paired(given: list[Row], objective: str) -> list[Row]:
    """Give rows the answers of other rows that posttrain would give them, where a step scores such."""
    from posttrain_plugins.preparation.mismatched import COLUMN, with_mismatched

    if not OBJECTIVES[objective].measured:
        return given
    return [{**row, OTHER: row[COLUMN]} for row in with_mismatched(given, SEED)]


def read_rows(job: Mapping[str, Any]) -> list[Row]:
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


def start_directory(shape: Shape, objective: str, cache: Path) -> Path:
    """Make the files that a training starts from: of a reward model the policy with a head that nobody has trained."""
    policy = model_directory(shape, cache)
    if not OBJECTIVES[objective].judged:
        return policy
    directory = policy.with_name(f"{policy.name}-judge")
    if not directory.exists():
        fresh = policy.with_name(f"{directory.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _write_judge(policy, fresh)
        fresh.rename(directory)
    return directory


def _write_judge(policy: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    from posttrain_plugins.models.policy import copy_companions
    from posttrain_plugins.models.vocabulary import PAD, SPECIAL

    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = SPECIAL.index(PAD)
    model.save_pretrained(directory)
    copy_companions(policy, directory)


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


def encoded(directory: Path, objective: str, given: list[Row]) -> Iterator[Row]:
    """Tokenize rows with posttrain's encoder, so that TRL trains on the very same tokens and labels."""
    from posttrain_plugins.templates.encoder import Encoder

    encoder = Encoder.open(directory)
    known = OBJECTIVES[objective]
    for row in paired(given, objective):
        sides = {
            side: encoder.encode_pair(row["prompt"], row[side]) for side in (*known.learned, *known.measured)
        }
        longest = max(len(side.tokens) for side in sides.values())
        yield {**FORMS[objective](row, sides, encoder.encode_prompt(row["prompt"])), "length": longest}


def _answers(sides: Mapping[str, Any], prompt: list[int]) -> dict[str, list[int]]:
    return {side: encoded.tokens[len(prompt) :] for side, encoded in sides.items()}


def _labels(side: Any) -> list[int]:
    pairs = zip(side.tokens, side.supervised, strict=True)
    return [token if counts else -100 for token, counts in pairs]


def _sft(row: Row, sides: Mapping[str, Any], prompt: list[int]) -> Row:
    side = sides["completion"]
    return {"input_ids": side.tokens, "labels": _labels(side)}


def _dpo(row: Row, sides: Mapping[str, Any], prompt: list[int]) -> Row:
    return {"prompt_ids": prompt, **{f"{side}_ids": ids for side, ids in _answers(sides, prompt).items()}}


def _kto(row: Row, sides: Mapping[str, Any], prompt: list[int]) -> Row:
    ids = _answers(sides, prompt)
    given = {"completion_ids": ids["completion"], "KL_completion_ids": ids[OTHER]}
    return {"prompt_ids": prompt, **given, "label": row["label"]}


def _labelled(row: Row, sides: Mapping[str, Any], prompt: list[int]) -> Row:
    made = {**row, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for name, side in sides.items():
        mask = [1] * len(side.tokens)
        made |= {
            f"{name}_input_ids": side.tokens,
            f"{name}_attention_mask": mask,
            f"{name}_labels": _labels(side),
        }
    return made


def _judged(row: Row, sides: Mapping[str, Any], prompt: list[int]) -> Row:
    return {f"{name}_ids": side.tokens for name, side in sides.items()}


FORMS: Mapping[str, Callable[[Row, Mapping[str, Any], list[int]], Row]] = {
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _labelled,
    "cpo": _labelled,
    "reward": _judged,
}
"""The columns that TRL's trainers take, by objective."""
