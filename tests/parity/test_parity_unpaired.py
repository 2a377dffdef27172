"""Losses over good and bad answers against trl: its own loss code on the same numbers, and whole trainings.

trl 1.16.0's `KTOTrainer._compute_loss` is called with a model that answers with given log-probs; posttrain gets the
same numbers, the same KL pairs with them, through `train.kto`. BCO is compared with what trl 1.13.0, the last release
that has it, has written down (`generate_bco.py`). Differences in definition, each with its reason:

- KL pairs: trl rotates the completions within each `per_device_train_batch_size` rows of the dataset, so it needs at
  least two rows a device and no shuffling, and may pair a row with its own answer; posttrain draws them over the whole
  dataset. Compared with trl's pairs given to both.
- The KL estimate: trl's is that of a micro-batch on all ranks, posttrain's that of the whole step. Compared where a
  step is one micro-batch.
- A step is averaged over its rows; trl averages over micro-batches that may be unequal. Compared where they are equal.
- BCO's weights by prompts are rows' weights here (`data.match_prompts`), an option of the trainer there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.training import completion_rows, model_artifact
from helpers.trl_runs import assert_same_run, ours, tokenizer, trl_arguments, trl_losses
from torch import Tensor, nn

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Family
from posttrain.contracts.registration import Group
from posttrain_plugins.data.similarity.prompt_classes import density_ratio
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.preparation.mismatched import COLUMN
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.trainers import kto as trainer_module

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS, PROMPT = 7, 2
LABELS = {
    "both": [True, False, False, True, True, False, True],
    "good": [True] * ROWS,
    "bad": [False] * ROWS,
}


class Drawn:
    """Random log-probs of ragged answers, and Σ log π of other rows' answers to the same prompts."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 9, (ROWS,), generator=source)
        columns = torch.arange(PROMPT + int(self.lengths.max()))
        self.mask = (columns >= PROMPT) & (columns < PROMPT + self.lengths[:, None])
        self.shifted = self.mask[:, 1:]
        self.policy = -2 * torch.rand(self.shifted.shape, generator=source)
        self.reference = (self.policy + torch.randn(self.policy.shape, generator=source)) * self.shifted
        self.other = -9 * torch.rand(ROWS, generator=source)
        self.other_reference = self.other - 3 * torch.rand(ROWS, generator=source) + 0.5


class Answering(nn.Module):
    """Stands for a model: it answers with given log-probs."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        names = ("entropy", "mean_logits")
        self.found = SimpleNamespace(
            log_probs=log_probs, **{name: torch.zeros_like(log_probs) for name in names}
        )

    def forward(self, **inputs: Any) -> Any:
        return self.found


class Metrics(dict[str, Any]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


def theirs(drawn: Drawn, logp: Tensor, desirable: Sequence[bool], **options: Any) -> tuple[Tensor, Metrics]:
    """What trl's own code makes of these numbers, and its metrics."""
    from trl import KTOTrainer

    given = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **options}
    metrics = Metrics()
    trainer = SimpleNamespace(
        **given,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
        ),
        calculate_KL=options["loss_type"] == "kto",
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: drawn.other,
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(drawn.mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(drawn.mask.shape, dtype=torch.long),
        "completion_mask": drawn.mask.long(),
        "label": torch.tensor(desirable),
        "ref_logps": drawn.reference.sum(1),
        "ref_KL_logps": drawn.other_reference,
    }
    loss: Tensor = KTOTrainer._compute_loss(trainer, Answering(logp * drawn.shifted), inputs, False)
    return loss, metrics


def mine(
    drawn: Drawn, logp: Tensor, desirable: Sequence[bool], name: str, **options: Any
) -> tuple[Tensor, Any]:
    """What posttrain makes of them, in one part, and its output."""
    loss = catalogue().make(Group.LOSS, name)
    batch = batch_of(
        Family.UNPAIRED,
        torch.float32,
        logp=(logp * drawn.shifted).sum(1),
        reference=drawn.reference.sum(1),
        tokens=drawn.lengths,
        desirable=list(desirable),
        mismatched=drawn.other,
        reference_mismatched=drawn.other_reference,
    )
    config = loss.config(**options)
    stats = {key: value.double() for key, value in loss.measure(batch, config, {}).items()}
    output = loss(batch, config, stats, {})
    (term,) = output.terms
    return term.reduction.total(term.values, part_of(batch)), output.metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.1, 1.5])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_every_loss(name: str, labels: str, beta: float, seed: int):
    drawn, desirable = Drawn(seed), LABELS[labels]
    options = {"beta": beta, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    first, second = (drawn.policy.clone().requires_grad_() for _ in range(2))
    expected, their_metrics = theirs(drawn, first, desirable, loss_type=name, **options)
    found, metrics = mine(drawn, second, desirable, name, **options)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward(), found.backward()
    assert first.grad is not None and second.grad is not None
    largest = float(first.grad.abs().max())
    assert largest > 1e-6
    assert float((first.grad - second.grad).abs().max()) <= 1e-5 * largest
    for key in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        assert (key in their_metrics) == bool(len(metrics[key]))
        if key in their_metrics:
            assert metrics[key].mean().item() == pytest.approx(their_metrics[key][0], rel=1e-5)
    if name == "kto":
        assert metrics["kl"][0].item() == pytest.approx(their_metrics["kl"][0], rel=1e-5)
        assert metrics["kl"][0] > 0


BCO = json.loads(Path(__file__).with_name("bco_of_trl.json").read_text(encoding="utf-8"))


def test_bco():
    """Step by step with one running mean and weights by prompts, in float64."""
    loss = catalogue().make(Group.LOSS, "bco")
    config = loss.config(beta=BCO["beta"])
    state = loss.begin(config)
    assert len(BCO["steps"]) > 3
    for step in BCO["steps"]:
        count = len(step["logp"])
        batch = batch_of(
            Family.UNPAIRED,
            logp=step["logp"],
            reference=step["reference"],
            desirable=[row < step["good"] for row in range(count)],
            weight=[1.0] * step["good"] + step["weights"],
        )
        probabilities = torch.tensor(step["probabilities"], dtype=torch.float64)
        found = density_ratio(probabilities, torch.zeros(len(probabilities), dtype=torch.bool), 0.5, 10.0)
        assert found.tolist() == pytest.approx(step["weights"], rel=1e-5)
        logp = batch.logp.requires_grad_()
        with torch.no_grad():
            stats = dict(loss.measure(batch, config, state))
        state = loss.advance(state, stats, config)
        (term,) = loss(batch, config, stats, state).terms
        total = term.reduction.total(term.values, part_of(batch))
        total.backward()
        assert state["mean"] == pytest.approx(step["delta"], rel=1e-5)
        assert total.item() == pytest.approx(step["loss"], rel=1e-5)
        assert logp.grad.tolist() == pytest.approx(step["gradient"], rel=1e-5, abs=1e-9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=32)


BATCH = 4


def rotated(rows: Sequence[Any], seed: int) -> list[Any]:
    """trl's pairs: within each batch, a row is given the completion of the one before it."""
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    return [
        {**row, COLUMN: batch[number - 1]["completion"]}
        for batch in batches
        for number, row in enumerate(batch)
    ]


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_twenty_steps(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch, name: str):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    data = [{**row, "label": i % 3 > 0} for i, row in enumerate(completion_rows(12))]
    policy = load_model(model.path, "float32")
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    arguments = trl_arguments(
        KTOConfig, tmp_path / "trl", "train.kto", BATCH, 1, loss_type=name, beta=0.3, **weights
    )
    trainer = KTOTrainer(
        model=policy,
        ref_model=load_model(model.path, "float32"),
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    encoder = Encoder.open(model.path)
    for row, prepared in zip(data, trainer.train_dataset, strict=True):
        own = encoder.encode_pair(row["prompt"], row["completion"])
        assert own.tokens == prepared["prompt_ids"] + prepared["completion_ids"]
    losses = trl_losses(trainer)
    divergences = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    monkeypatch.setattr(trainer_module, "with_mismatched", rotated)
    loss = {"name": name, "beta": 0.3, **weights}
    context = ours(tmp_path, "train.kto", model, data, "unpaired_preference", loss=loss)
    assert max(losses) - min(losses) > 0.01
    assert_same_run(context, tmp_path, losses, policy)
    if name == "kto":
        found = [values["kl"] for _, values in sorted(context.seen_metrics.items()) if "kl" in values]
        assert found == pytest.approx(divergences, abs=1e-4)
        assert max(found) > 0.1
