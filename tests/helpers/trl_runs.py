"""Trainings of trl and of posttrain on the same model, tokens and order, to be compared step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.training import Context, context_for, dataset_artifact, train, weights

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.templates.encoder import Encoder

STEPS = 20
RATE = {"train.sft": 3e-3}
"""Peak learning rates of trainers; of all others 1e-3."""
SHARED: dict[str, Any] = {
    "max_steps": STEPS,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
}


def trl_arguments(
    config: type[Any], directory: Path, uses: str, rows: int, accumulation: int, **more: Any
) -> Any:
    return config(
        output_dir=str(directory),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE.get(uses, 1e-3),
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        activation_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        **{"max_length": None, **SHARED, **more},
    )


def trl_losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def ours(directory: Path, uses: str, model: Artifact, rows: Any, format: str, **options: Any) -> Context:
    context = context_for(
        directory,
        uses,
        model,
        rows,
        format,
        batch_size=4,
        shuffle=False,
        micro_batch_tokens=60,
        **{**SHARED, "learning_rate": RATE.get(uses, 1e-3), **options},
    )
    train(context)
    return context


def going_on(
    directory: Path, uses: str, adapter: Artifact, base: Artifact, rows: Any, format: str, **options: Any
) -> Context:
    """Go on with an adapter of a base as `ours` trains a model."""
    stage = catalogue().stage(uses)
    config = configured(
        stage,
        batch_size=4,
        shuffle=False,
        micro_batch_tokens=60,
        logging_steps=1,
        **{**SHARED, "learning_rate": RATE.get(uses, 1e-3), **options},
    )
    given = {"model": [adapter], "data": [dataset_artifact(directory / "data", rows, format)]}
    context = Context(directory / "ours", stage, config, given)
    context.known = {base.digest: base}
    train(context)
    return context


def token_rows(model: Artifact, data: list[dict[str, Any]]) -> Any:
    """Return rows of tokens, as trl takes them, with the answers' tokens to be learned."""
    from datasets import Dataset

    encoder = Encoder.open(model.path)
    encoded = [encoder.encode_pair(row["prompt"], row["completion"]) for row in data]
    return Dataset.from_list(
        [{"input_ids": row.tokens, "completion_mask": list(map(int, row.supervised))} for row in encoded]
    )


def assert_same_run(context: Context, directory: Path, losses: list[float], trained: torch.nn.Module) -> None:
    assert len(losses) == STEPS
    assert context.losses == pytest.approx(losses, abs=1e-5)
    found, expected = weights(directory / "out-model"), dict(trained.named_parameters())
    gap = max(float((found[name] - expected[name].detach()).abs().max()) for name in found)
    assert gap < 1e-4


def tokenizer(model: Artifact) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model.path)


def assert_same_tokens(prepared: Any, data: list[dict[str, Any]], encoder: Encoder) -> None:
    for row, theirs in zip(data, prepared, strict=True):
        for side in ("chosen", "rejected"):
            mine = encoder.encode_pair(row["prompt"], row[side])
            assert mine.tokens == theirs["prompt_ids"] + theirs[f"{side}_ids"]
            assert sum(mine.supervised) == len(theirs[f"{side}_ids"])
