"""Loss by loss against trl 1.16.0: same model, same tokens, same order, float32, no dropout.

The steps compared are whole optimizer steps; trl cuts them by rows (`per_device_train_batch_size`), posttrain by
tokens. One difference in definition is left out: trl's `sigmoid` ignores `label_smoothing`, posttrain's is cDPO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import (
    Context,
    completion_rows,
    context_for,
    model_artifact,
    preference_rows,
    train,
    weights,
)

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder

STEPS = 20
RATE = {"train.sft": 3e-3, "train.dpo": 1e-3}
SHARED: dict[str, Any] = {
    "max_steps": STEPS,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
}

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=32)


def trl_arguments(
    config: type[Any], directory: Path, uses: str, rows: int, accumulation: int, **more: Any
) -> Any:
    return config(
        output_dir=str(directory),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE[uses],
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        activation_checkpointing=False,
        max_length=None,
        use_cpu=True,
        disable_tqdm=True,
        **SHARED,
        **more,
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
        **{**SHARED, "learning_rate": RATE[uses], **options},
    )
    train(context)
    return context


def assert_same_run(context: Context, directory: Path, losses: list[float], trained: torch.nn.Module) -> None:
    assert len(losses) == STEPS
    assert context.losses == pytest.approx(losses, abs=1e-5)
    found, expected = weights(directory / "out-model"), dict(trained.named_parameters())
    gap = max(float((found[name] - expected[name].detach()).abs().max()) for name in found)
    assert gap < 1e-4


def tokenizer(model: Artifact) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model.path)


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (2, 2)])
def test_sft(tmp_path: Path, model: Artifact, rows: int, accumulation: int):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = completion_rows(10)
    encoder = Encoder.open(model.path)
    encoded = [encoder.encode_pair(row["prompt"], row["completion"]) for row in data]
    dataset = Dataset.from_list(
        [{"input_ids": row.tokens, "completion_mask": list(map(int, row.supervised))} for row in encoded]
    )
    policy = load_model(model.path, "float32")
    trainer = SFTTrainer(
        model=policy,
        args=trl_arguments(
            SFTConfig, tmp_path / "trl", "train.sft", rows, accumulation, completion_only_loss=True
        ),
        train_dataset=dataset,
        processing_class=tokenizer(model),
    )
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.sft", model, data, "prompt_completion")
    assert context.losses[0] - context.losses[-1] > 0.1
    assert_same_run(context, tmp_path, losses, policy)


IGNORED = -100
"""The label of a token that trl does not train on."""

CLOSED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with nothing after an answer's end of turn; trl would supervise what comes after it too."""


def as_chats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in rows
    ]


@pytest.mark.parametrize("chats", [False, True])
def test_sft_tokenizes_and_masks_alike(tmp_path: Path, chats: bool):
    """From raw rows: trl's own tokenization and completion mask against posttrain's, and the losses after them."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    closed = model_artifact(tmp_path / "closed", hidden_size=32, template=CLOSED)
    data = as_chats(completion_rows(10)) if chats else completion_rows(10)
    policy = load_model(closed.path, "float32")
    trainer = SFTTrainer(
        model=policy,
        args=trl_arguments(SFTConfig, tmp_path / "trl", "train.sft", 4, 1, completion_only_loss=True),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(closed),
    )
    encoder = Encoder.open(closed.path)
    for row, theirs in zip(data, trainer.train_dataset, strict=True):
        mine = encoder.encode_pair(row["prompt"], row["completion"])
        assert mine.tokens == theirs["input_ids"]
        pairs = zip(mine.tokens, mine.supervised, strict=True)
        assert [token if counts else IGNORED for token, counts in pairs] == theirs["labels"]
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.sft", closed, data, "prompt_completion")
    assert_same_run(context, tmp_path, losses, policy)


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (2, 2)])
def test_dpo(tmp_path: Path, model: Artifact, rows: int, accumulation: int):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = preference_rows(10)
    policy = load_model(model.path, "float32")
    trainer = DPOTrainer(
        model=policy,
        ref_model=load_model(model.path, "float32"),
        args=trl_arguments(DPOConfig, tmp_path / "trl", "train.dpo", rows, accumulation, beta=0.3),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    assert_same_tokens(trainer.train_dataset, data, Encoder.open(model.path))
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.dpo", model, data, "preference", loss={"name": "sigmoid", "beta": 0.3})
    assert_same_run(context, tmp_path, losses, policy)
    last = context.seen_metrics[STEPS]
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["rewards/margin"] == pytest.approx(theirs["rewards/margins"], abs=1e-4)
    assert last["rewards/accuracy"] == pytest.approx(theirs["rewards/accuracies"])


def assert_same_tokens(prepared: Any, data: list[dict[str, Any]], encoder: Encoder) -> None:
    for row, theirs in zip(data, prepared, strict=True):
        for side in ("chosen", "rejected"):
            mine = encoder.encode_pair(row["prompt"], row[side])
            assert mine.tokens == theirs["prompt_ids"] + theirs[f"{side}_ids"]
            assert sum(mine.supervised) == len(theirs[f"{side}_ids"])
