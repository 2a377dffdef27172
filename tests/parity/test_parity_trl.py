"""Loss by loss against trl 1.16.0: same model, same tokens, same order, float32, no dropout.

The steps compared are whole optimizer steps; trl cuts them by rows (`per_device_train_batch_size`), posttrain by
tokens. One difference in definition is left out: trl's `sigmoid` ignores `label_smoothing`, posttrain's is cDPO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.training import completion_rows, model_artifact, preference_rows
from helpers.trl_runs import (
    STEPS,
    assert_same_run,
    assert_same_tokens,
    ours,
    token_rows,
    tokenizer,
    trl_arguments,
    trl_losses,
)

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=32)


@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (2, 2)])
def test_sft(tmp_path: Path, model: Artifact, rows: int, accumulation: int):
    from trl import SFTConfig, SFTTrainer

    data = completion_rows(10)
    policy = load_model(model.path, "float32")
    trainer = SFTTrainer(
        model=policy,
        args=trl_arguments(
            SFTConfig, tmp_path / "trl", "train.sft", rows, accumulation, completion_only_loss=True
        ),
        train_dataset=token_rows(model, data),
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
