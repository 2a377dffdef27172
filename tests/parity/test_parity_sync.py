"""A reference that follows the policy, against trl 1.16.0's `sync_ref_model`: same model, tokens and order."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.training import model_artifact, preference_rows
from helpers.trl_runs import assert_same_run, ours, tokenizer, trl_arguments, trl_losses

from posttrain_plugins.models.policy import load_model

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(("steps", "alpha"), [(3, 0.6), (1, 0.25), (4, 1.0)])
def test_dpo(tmp_path: Path, steps: int, alpha: float):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = model_artifact(tmp_path / "model", hidden_size=32)
    data = preference_rows(10)
    policy = load_model(model.path, "float32")
    sync = {"sync_ref_model": True, "ref_model_sync_steps": steps, "ref_model_mixup_alpha": alpha}
    trainer = DPOTrainer(
        model=policy,
        ref_model=load_model(model.path, "float32"),
        args=trl_arguments(DPOConfig, tmp_path / "trl", "train.dpo", 4, 1, beta=0.3, **sync),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    losses = trl_losses(trainer)
    context = ours(
        tmp_path,
        "train.dpo",
        model,
        data,
        "preference",
        loss={"name": "sigmoid", "beta": 0.3},
        reference_sync={"steps": steps, "alpha": alpha},
    )
    assert_same_run(context, tmp_path, losses, policy)
