"""Twenty steps that go on with an adapter against trl 1.16.0: same adapter, same tokens, same order, float32.

Both take the policy that the training starts with for the reference: trl by a second adapter, which it copies from the
first, posttrain by scoring the rows before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.models import as_artifact
from helpers.training import (
    completion_rows,
    model_artifact,
    preference_rows,
)
from helpers.trl_runs import STEPS, going_on, ours, token_rows, tokenizer, trl_arguments, trl_losses
from safetensors.torch import load_file

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.models.adapters import adapter_state, open_adapter
from posttrain_plugins.models.policy import load_model

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated, and warns of what is experimental.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*experimental.*"),
]


@dataclass(frozen=True)
class Started:
    """A base and an adapter that was trained for a few steps: what it says is not what the base says."""

    base: Artifact
    adapter: Artifact


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    directory = tmp_path_factory.mktemp("started")
    base = model_artifact(directory / "base", hidden_size=32)
    first = ours(
        directory / "first",
        "train.sft",
        base,
        completion_rows(8),
        "prompt_completion",
        lora={"r": 4},
        max_steps=4,
        warmup_steps=0,
    )
    kind, facts = first.described["model"]
    return Started(base, as_artifact(first.output("model"), facts, kind))


def trl_sft(directory: Path, policy: Any, base: Artifact, data: list[dict[str, Any]]) -> Any:
    from trl import SFTConfig, SFTTrainer

    arguments = trl_arguments(SFTConfig, directory, "train.sft", 2, 2, completion_only_loss=True)
    return SFTTrainer(
        policy, arguments, train_dataset=token_rows(base, data), processing_class=tokenizer(base)
    )


def trl_dpo(directory: Path, policy: Any, base: Artifact, data: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = trl_arguments(DPOConfig, directory, "train.dpo", 2, 2, beta=0.3)
    return DPOTrainer(
        policy, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer(base)
    )


def trl_cpo(directory: Path, policy: Any, base: Artifact, data: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    arguments = trl_arguments(CPOConfig, directory, "train.cpo", 4, 1, max_length=256, beta=0.3)
    return CPOTrainer(
        policy, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer(base)
    )


TRIED: dict[str, tuple[Callable[..., Any], list[dict[str, Any]], str, Any]] = {
    "train.sft": (trl_sft, completion_rows(10), "prompt_completion", "nll"),
    "train.dpo": (trl_dpo, preference_rows(10), "preference", {"name": "sigmoid", "beta": 0.3}),
    "train.cpo": (trl_cpo, preference_rows(10), "preference", {"name": "cpo", "beta": 0.3}),
}


@pytest.mark.parametrize("uses", TRIED)
def test_twenty_steps(tmp_path: Path, started: Started, uses: str):
    make, data, format, loss = TRIED[uses]
    policy = open_adapter(load_model(started.base.path, "float32"), started.adapter.path, trainable=True)
    before = {name: tensor.clone() for name, tensor in adapter_state(policy).items()}
    losses = trl_losses(make(tmp_path / "trl", policy, started.base, data))
    context = going_on(tmp_path, uses, started.adapter, started.base, data, format, loss=loss)
    assert len(losses) == STEPS and max(losses) - min(losses) > 0.01
    assert context.losses == pytest.approx(losses, abs=1e-5)
    found = load_file(context.output("model") / "adapter_model.safetensors")
    expected = adapter_state(policy)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - before[name]).abs().max()) for name in found) > 1e-3
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-4
