"""Reward models against trl 1.16.0: its own loss code on the same numbers, and whole trainings.

Deliberate differences, each with its reason:

- A step cut by `gradient_accumulation_steps`: trl averages the means of its parts, so that pairs of a short last part
  weigh more; posttrain averages over all pairs of the step. Compared where the parts are equal.
- Fresh heads are drawn by other generators: trl's from the global one, posttrain's from `seed` alone. Both sides start
  from the same head here.
- Where padding and the end of answers are one token, trl's reward is read at the token before the end, since
  transformers tells padding by its id; posttrain reads the end. Compared with a padding token of its own.
- Without `max_length` posttrain takes what the model can take; trl's default is 1024. Both drop longer rows.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import as_artifact
from helpers.training import model_artifact, preference_rows
from helpers.trl_runs import STEPS, assert_same_run, going_on, ours, tokenizer, trl_arguments, trl_losses

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Family
from posttrain_plugins.losses.reward.bradley_terry import BradleyTerry
from posttrain_plugins.models.valued import open_valued, save_valued
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.testing.batches import batch_of, part_of

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
VARIANTS = pytest.mark.parametrize(
    ("center", "margins"), [(0.0, False), (0.0, True), (0.01, False), (0.5, True)]
)


def theirs(rewards: torch.Tensor, center: float, margin: torch.Tensor | None) -> torch.Tensor:
    """What trl makes of rewards, chosen ones first: its own `compute_loss` around a model that answers with them."""
    from trl import RewardTrainer

    logs = {"eval": {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=center or None),
        accelerator=SimpleNamespace(gather=lambda each: each, gather_for_metrics=lambda each: each),
        _total_train_tokens=0,
        _metrics=logs,
    )
    given: dict[str, Any] = {} if margin is None else {"margin": margin}
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards[:, None]), given)


@VARIANTS
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_loss_and_its_gradient(center: float, margins: bool, spread: float):
    source = torch.Generator().manual_seed(7)
    pairs = 9
    rewards = spread * torch.randn(2 * pairs, generator=source)
    margin = torch.rand(pairs, generator=source) if margins else None
    one, other = rewards.clone().requires_grad_(), rewards.clone().requires_grad_()
    expected = theirs(one, center, margin)
    batch = batch_of(
        Family.REWARD,
        dtype=torch.float32,
        reward=other.view(2, pairs).T.flatten(),
        **({} if margin is None else {"margin": margin}),
    )
    output = BradleyTerry()(batch, BradleyTerry.config(center=center), {}, {})
    found = sum(each.weight * each.reduction.total(each.values, part_of(batch)) for each in output.terms)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    expected.backward()
    found.backward()
    assert torch.allclose(other.grad, one.grad, atol=1e-6)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A reward model that nobody has trained, to start both sides from one head."""
    policy = model_artifact(tmp_path_factory.mktemp("policy"), hidden_size=32)
    directory = tmp_path_factory.mktemp("headed")
    opened = open_valued(policy, SimpleNamespace(), Kind.REWARD_MODEL, seed=5)
    facts = save_valued(directory, opened.model, policy.path)
    return as_artifact(directory, facts, Kind.REWARD_MODEL)


def rows(margins: bool) -> list[dict[str, Any]]:
    made = preference_rows(12)
    return [{**row, "margin": number / 8} for number, row in enumerate(made)] if margins else made


def trainer_of(
    directory: Path, model: Any, artifact: Artifact, data: Any, accumulation: int, center: float
) -> Any:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    arguments = trl_arguments(
        RewardConfig,
        directory / "trl",
        "train.reward",
        4 // accumulation,
        accumulation,
        center_rewards_coefficient=center or None,
    )
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(artifact),
    )
    encoder = Encoder.open(artifact.path)
    for row, prepared in zip(data, trainer.train_dataset, strict=True):
        for side in ("chosen", "rejected"):
            assert encoder.encode_pair(row["prompt"], row[side]).tokens == prepared[f"{side}_ids"]
    return trainer


@VARIANTS
@pytest.mark.parametrize("accumulation", [1, 2])
def test_twenty_steps(tmp_path: Path, headed: Artifact, center: float, margins: bool, accumulation: int):
    data = rows(margins)
    model = open_valued(headed, SimpleNamespace(), Kind.REWARD_MODEL, trainable=True).model
    trainer = trainer_of(tmp_path, model, headed, data, accumulation, center)
    losses = trl_losses(trainer)
    context = ours(
        tmp_path, "train.reward", headed, data, "preference", loss={"name": "bradley_terry", "center": center}
    )
    assert context.losses[0] - context.losses[-1] > 0.05
    assert_same_run(context, tmp_path, losses, model)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    last = context.seen_metrics[STEPS]
    if accumulation == 1:
        assert last["accuracy"] == pytest.approx(logged["accuracy"])
        assert last["rewards/margin"] == pytest.approx(logged["margin"], abs=1e-4)
        assert last["rewards/mean"] == pytest.approx(logged["mean_reward"], abs=1e-4)


def test_twenty_steps_of_an_adapter_with_its_head(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy", hidden_size=32)
    data = rows(margins=True)
    first = ours(
        tmp_path / "first",
        "train.reward",
        policy,
        data,
        "preference",
        lora={"r": 4},
        max_steps=4,
        warmup_steps=0,
    )
    kind, facts = first.described["model"]
    artifact = as_artifact(first.output("model"), facts, kind)
    opened = open_valued(artifact, first, Kind.REWARD_MODEL, trainable=True)
    trainer = trainer_of(tmp_path, opened.model, artifact, data, 1, 0.01)
    losses = trl_losses(trainer)
    loss = {"name": "bradley_terry", "center": 0.01}
    context = going_on(tmp_path, "train.reward", artifact, policy, data, "preference", loss=loss)
    assert len(losses) == STEPS and context.losses == pytest.approx(losses, abs=1e-5)
    mine = open_valued(
        as_artifact(context.output("model"), context.described["model"][1], kind), context, Kind.REWARD_MODEL
    ).model
    expected = dict(opened.model.named_parameters())
    for name, tensor in mine.named_parameters():
        assert float((tensor - expected[name]).detach().abs().max()) < 1e-4, name
