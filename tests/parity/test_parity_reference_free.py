"""Losses without a reference, and losses over tokens, against trl 1.16.0: its own code on the same numbers, and curves.

Deliberate differences, with their reasons, in `docs/parity-losses.md`: ORPO's likelihood is that of the answer and
not of the prompt too; a step's likelihood is the mean over its tokens however it is cut; TPO-L's defaults; SimPO's
margin has two names; `beta` and the weight of TPO's gold answers are positive.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.training import completion_rows, model_artifact, preference_rows, three_way_rows
from helpers.trl_runs import STEPS, assert_same_run, ours, token_rows, tokenizer, trl_arguments, trl_losses

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Loss, ThreeWayBatch
from posttrain_plugins.losses.preference.alphapo import AlphaPo
from posttrain_plugins.losses.preference.cpo import Cpo
from posttrain_plugins.losses.preference.orpo import Orpo
from posttrain_plugins.losses.preference.simpo import Simpo
from posttrain_plugins.losses.three_way.tpo import Tpo
from posttrain_plugins.losses.three_way.tpo_l import TpoL
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.stepping import Shown, take_step

FIVE = {"abs": 1e-5, "rel": 1e-5}

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated, and says so of label smoothing.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def silent() -> Iterator[None]:
    """trl warns on import that its experimental trainers are experimental."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        warnings.simplefilter("ignore")
        import trl.experimental.cpo
        import trl.experimental.orpo
        import trl.experimental.tpo  # noqa: F401

        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=32)


def random(*shape: int, low: float = -30.0, high: float = -0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return low + (high - low) * torch.rand(*shape, generator=generator)


def own_values(loss: type[Loss], batch: Any, **options: Any) -> torch.Tensor:
    """Values of the pairs, without the likelihood term."""
    terms = loss()(batch, loss.config(**options), {}, {}).terms
    (pairs,) = [term for term in terms if str(term.reduction) == "example_mean"]
    return pairs.values * pairs.weight


HERE = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value, gather=lambda value: value)


# trl's own code on the same numbers


@pytest.mark.parametrize(
    ("kind", "loss", "theirs", "mine"),
    [
        ("sigmoid", Cpo, {"beta": 0.1}, {"beta": 0.1}),
        ("sigmoid", Cpo, {"beta": 2.0, "label_smoothing": 0.2}, {"beta": 2.0, "label_smoothing": 0.2}),
        ("simpo", Simpo, {"beta": 2.5, "simpo_gamma": 1.4}, {"beta": 2.5, "gamma": 1.4}),
        ("simpo", Simpo, {"beta": 2.5, "simpo_gamma": 1.4}, {"beta": 2.5, "gamma_beta_ratio": 0.56}),
        ("simpo", AlphaPo, {"alpha": 0.25, "simpo_gamma": 0.5}, {"alpha": 0.25, "gamma": 0.5}),
        ("simpo", AlphaPo, {"alpha": -0.5, "simpo_gamma": 0.0}, {"alpha": -0.5, "gamma": 0.0}),
    ],
)
def test_cpos_losses(kind: str, loss: type[Loss], theirs: dict[str, Any], mine: dict[str, Any]):
    from trl.experimental.cpo import CPOTrainer

    counts = torch.tensor([3.0, 7.0, 1.0, 12.0])
    chosen, rejected = random(4, 1)[:, 0] / 2, random(4, 2)[:, 0] / 2
    means = kind == "simpo"
    given = {"beta": 0.5, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0, **theirs}
    trainer = SimpleNamespace(**given, loss_type=kind, accelerator=HERE)
    expected, better, worse = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    batch = batch_of(
        loss.family,
        torch.float32,
        chosen=chosen * counts if means else chosen,
        rejected=rejected * counts if means else rejected,
        chosen_tokens=counts,
        rejected_tokens=counts,
    )
    options = {"beta": given["beta"], **mine}
    assert own_values(loss, batch, **options).tolist() == pytest.approx(expected.tolist(), **FIVE)
    metrics = loss()(batch, loss.config(**options), {}, {}).metrics
    assert metrics["rewards/chosen"].tolist() == pytest.approx(better.tolist(), **FIVE)
    assert metrics["rewards/rejected"].tolist() == pytest.approx(worse.tolist(), **FIVE)


def test_orpos_odds():
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = random(6, 1, low=-4)[:, 0], random(6, 2, low=-4)[:, 0]
    trainer = SimpleNamespace(beta=0.3, accelerator=HERE)
    negative, better, worse, _, odds = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    batch = batch_of(Orpo.family, torch.float32, chosen=chosen, rejected=rejected)
    assert own_values(Orpo, batch, beta=0.3).tolist() == pytest.approx((-negative).tolist(), **FIVE)
    metrics = Orpo()(batch, Orpo.config(beta=0.3), {}, {}).metrics
    assert metrics["rewards/chosen"].tolist() == pytest.approx(better.tolist(), **FIVE)
    assert metrics["rewards/rejected"].tolist() == pytest.approx(worse.tolist(), **FIVE)
    assert metrics["odds/log_ratio"].mean().item() == pytest.approx(odds.item(), **FIVE)


@pytest.mark.parametrize(
    ("kind", "loss", "theirs", "mine"),
    [
        ("sigmoid", Tpo, {"beta": 0.01}, {"beta": 0.01}),
        ("sigmoid", Tpo, {"beta": 0.5, "label_smoothing": 0.1}, {"beta": 0.5, "label_smoothing": 0.1}),
        ("tpo-l", TpoL, {"beta": 2.0, "tpo_l_gamma": 1.6}, {"beta": 2.0, "gamma": 1.6}),
    ],
)
def test_tpos_losses_from_logits(kind: str, loss: type[Loss], theirs: dict[str, Any], mine: dict[str, Any]):
    """Masks, sums, means and the likelihood of gold tokens too, over random logits, with the gradient of these."""
    from trl.experimental.tpo import TPOTrainer

    logits = torch.randn(6, 7, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.randint(11, (6, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(6, 7, dtype=torch.long)
    for row, (start, end) in enumerate([(2, 5), (3, 7), (2, 7), (3, 4), (2, 4), (3, 6)]):
        mask[row, start:end] = 1
    trainer = SimpleNamespace(
        model=torch.nn.Identity(),
        **{"label_smoothing": 0.0, "tpo_l_gamma": 0.5, "tpo_alpha": 0.7, **theirs},
        loss_type=kind,
        accelerator=HERE,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask}
    expected = TPOTrainer._compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs, False)
    logp = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0] * mask[:, 1:]
    sums, counts = logp.sum(1).split(2), mask[:, 1:].sum(1).float().split(2)
    batch = ThreeWayBatch(*sums, *counts, weight=torch.ones(2))
    found = take_step(loss(), loss.config(tpo_alpha=0.7, **mine), [Shown(batch, part_of(batch), batch)]).total
    assert found.item() == pytest.approx(expected.item(), **FIVE)
    (slope,) = torch.autograd.grad(found, logits, retain_graph=True)
    torch.testing.assert_close(slope, torch.autograd.grad(expected, logits)[0])


# Curves


def short_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One token of prompt, which nothing predicts: then trl's likelihood of prompt and answer is that of the answer."""
    return [{**row, "prompt": "q"} for row in rows]


def assert_same_tokens(prepared: Any, data: list[dict[str, Any]], model: Artifact) -> None:
    encoder = Encoder.open(model.path)
    for row, theirs in zip(data, prepared, strict=True):
        for side in ("chosen", "rejected"):
            mine = encoder.encode_pair(row["prompt"], row[side])
            assert mine.tokens == theirs[f"{side}_input_ids"]
            assert sum(mine.supervised) == sum(label != -100 for label in theirs[f"{side}_labels"])


@pytest.mark.parametrize(
    ("kind", "theirs", "loss"),
    [
        ("sigmoid", {"beta": 0.3, "cpo_alpha": 0.5}, {"name": "cpo", "beta": 0.3, "cpo_alpha": 0.5}),
        (
            "simpo",
            {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
            {"name": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.5},
        ),
        (
            "simpo",
            {"beta": 1.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "alpha": 0.25},
            {"name": "alphapo", "alpha": 0.25, "beta": 1.0, "gamma": 0.5},
        ),
    ],
    ids=["cpo", "simpo", "alphapo"],
)
def test_cpo(tmp_path: Path, model: Artifact, kind: str, theirs: dict[str, Any], loss: dict[str, Any]):
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    data = preference_rows(10)
    policy = load_model(model.path, "float32")
    arguments = trl_arguments(
        CPOConfig, tmp_path / "trl", "train.cpo", 4, 1, max_length=256, loss_type=kind, **theirs
    )
    trainer = CPOTrainer(
        model=policy,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    assert_same_tokens(trainer.train_dataset, data, model)
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.cpo", model, data, "preference", loss=loss)
    assert_same_run(context, tmp_path, losses, policy)


def test_orpo(tmp_path: Path, model: Artifact):
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    data = short_prompts(preference_rows(10))
    policy = load_model(model.path, "float32")
    trainer = ORPOTrainer(
        model=policy,
        args=trl_arguments(ORPOConfig, tmp_path / "trl", "train.orpo", 4, 1, max_length=256, beta=0.3),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    assert_same_tokens(trainer.train_dataset, data, model)
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.orpo", model, data, "preference", loss={"name": "orpo", "beta": 0.3})
    assert_same_run(context, tmp_path, losses, policy)
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert context.seen_metrics[STEPS]["odds/log_ratio"] == pytest.approx(last["log_odds_chosen"], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "theirs", "loss"),
    [
        ("sigmoid", {"beta": 0.2, "tpo_alpha": 0.5}, {"name": "tpo", "beta": 0.2, "tpo_alpha": 0.5}),
        ("tpo-l", {"beta": 2.0, "tpo_l_gamma": 1.6}, {"name": "tpo_l"}),
    ],
    ids=["tpo", "tpo_l"],
)
def test_tpo(tmp_path: Path, model: Artifact, kind: str, theirs: dict[str, Any], loss: dict[str, Any]):
    from datasets import Dataset
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    data = three_way_rows(10)
    given = [{**row, "reference": row["gold"]} for row in data]
    policy = load_model(model.path, "float32")
    trainer = TPOTrainer(
        model=policy,
        args=trl_arguments(TPOConfig, tmp_path / "trl", "train.tpo", 4, 1, loss_type=kind, **theirs),
        train_dataset=Dataset.from_list(given),
        processing_class=tokenizer(model),
    )
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.tpo", model, data, "three_way", loss=loss)
    assert_same_run(context, tmp_path, losses, policy)


@pytest.mark.parametrize(
    ("theirs", "loss"),
    [
        ({"loss_type": "dft"}, "dft"),
        ({"label_smoothing_factor": 0.1}, {"name": "label_smoothing", "epsilon": 0.1}),
    ],
    ids=["dft", "label_smoothing"],
)
@pytest.mark.parametrize(("rows", "accumulation"), [(4, 1), (2, 2)])
def test_sft(
    tmp_path: Path, model: Artifact, theirs: dict[str, Any], loss: Any, rows: int, accumulation: int
):
    from trl import SFTConfig, SFTTrainer

    data = completion_rows(10)
    policy = load_model(model.path, "float32")
    arguments = trl_arguments(
        SFTConfig, tmp_path / "trl", "train.sft", rows, accumulation, completion_only_loss=True, **theirs
    )
    trainer = SFTTrainer(
        model=policy, args=arguments, train_dataset=token_rows(model, data), processing_class=tokenizer(model)
    )
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.sft", model, data, "prompt_completion", loss=loss)
    assert_same_run(context, tmp_path, losses, policy)
