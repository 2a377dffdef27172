"""Losses over pairs with a reference against trl 1.16.0: its own loss code on the same numbers, and whole trainings.

trl's `DPOTrainer._compute_loss` is called with a model that answers with given log-probs; posttrain gets the same
numbers through `train.dpo`. Differences in definition, each with its reason:

- `bco_pair`: trl has no shift δ; posttrain's is the running mean of rewards, as in the paper. Compared with δ = 0.
- `aot`, `aot_unpaired`: trl sorts each micro-batch of each rank, posttrain the whole step. Compared where they are one.
- `sigmoid`: trl ignores `label_smoothing`, posttrain's is cDPO.
- `sft`: under `ld_alpha` and `weighting` posttrain treats it as every other loss; trl leaves its tokens as they are and
  multiplies its mean. Compared without them.
- WPO with `aot` and `aot_unpaired` is refused by trl; in posttrain the weights of rows are masses that are transported.
  With `hinge` trl's backward pass fails, as it multiplies the values of the hinge in place.
- Divergences: trl's e^x overflows to infinity beyond 88 (alpha: stays constant beyond 80); posttrain's goes on as a
  straight line from 30 on. Compared below that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.training import model_artifact, preference_rows
from helpers.trl_runs import assert_same_run, assert_same_tokens, ours, tokenizer, trl_arguments, trl_losses
from torch import Tensor, nn

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Family, Need, Scope
from posttrain.contracts.reduction import Counts, Part
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, Scores, TokenSequence
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.trainers.dpo import Dpo

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PAIRS, PROMPT = 7, 2
DPO = Dpo()


class Drawn:
    """Random log-probs of pairs of ragged answers: [2 · PAIRS] rows as trl has them, chosen ones first."""

    def __init__(self, seed: int, spread: float = 0.5) -> None:
        source = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 9, (2 * PAIRS,), generator=source)
        width = PROMPT + int(self.lengths.max())
        columns = torch.arange(width)
        self.mask = (columns >= PROMPT) & (columns < PROMPT + self.lengths[:, None])
        self.shifted = self.mask[:, 1:]
        policy = -2 * torch.rand(self.shifted.shape, generator=source)
        nearby = policy + spread * torch.randn(self.shifted.shape, generator=source)
        self.policy, self.reference = policy * self.shifted, nearby * self.shifted
        self.squares = 0.05 + 0.9 * torch.rand(self.shifted.shape, generator=source)

    def scores(self, logp: Tensor) -> Scores:
        """The same numbers as posttrain's loop has them: the answers of a pair follow each other."""
        order = torch.arange(2 * PAIRS).view(2, PAIRS).T.flatten()
        lengths, shifted = self.lengths[order], self.shifted[order]

        def flat(values: Tensor) -> Tensor:
            return values[order][shifted]

        sequence = torch.repeat_interleave(lengths)
        reference = flat(self.reference)
        sums = reference.new_zeros(2 * PAIRS).index_add(0, sequence, reference)
        return Scores(
            examples=[example(row, *pair) for row, pair in enumerate(lengths.view(PAIRS, 2).tolist())],
            logp=flat(logp),
            entropy=torch.zeros(len(sequence)),
            top1=torch.zeros(len(sequence), dtype=torch.bool),
            sequence=sequence,
            lengths=lengths,
            weight=torch.ones(PAIRS),
            reference=sums,
            squares=flat(self.squares),
            reference_logp=reference,
        )


def example(row: int, chosen: int, rejected: int) -> Example:
    sequences = [
        TokenSequence([0] * (length + 1), [False] + [True] * length, role)
        for role, length in (("chosen", chosen), ("rejected", rejected))
    ]
    return Example(row, tuple(sequences))


class Answering(nn.Module):
    """A model that answers with given log-probs."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor, squares: Tensor) -> None:
        super().__init__()
        self.found = SimpleNamespace(
            log_probs=log_probs,
            log_sum_sq_probs=squares.log(),
            entropy=torch.zeros_like(log_probs),
            mean_logits=torch.zeros_like(log_probs),
            is_top1=torch.zeros_like(log_probs, dtype=torch.bool),
        )

    def forward(self, **inputs: Any) -> Any:
        return self.found


class Metrics(dict[str, Any]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


def theirs(drawn: Drawn, logp: Tensor, **options: Any) -> Tensor:
    """What trl's own code makes of these numbers."""
    from trl import DPOTrainer

    model = Answering(logp * drawn.shifted, drawn.squares)
    given: dict[str, Any] = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "loss_weights": None}
    given |= {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "use_weighting": False}
    given |= {"discopop_tau": 0.05, **options}
    trainer = SimpleNamespace(
        **given,
        model=model,
        ref_model=Answering(drawn.reference, drawn.squares),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=given["discopop_tau"]),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
        ),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics={"train": Metrics()},
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.loss_weights = given["loss_weights"] or [1.0] * len(given["loss_types"])
    inputs = {
        "input_ids": torch.zeros(drawn.mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(drawn.mask.shape, dtype=torch.long),
        "completion_mask": drawn.mask.long(),
    }
    loss: Tensor = DPOTrainer._compute_loss(trainer, model, inputs, False)
    return loss


def mine(drawn: Drawn, logp: Tensor, name: str, options: Mapping[str, Any], **trainer: Any) -> Tensor:
    """What posttrain makes of them, in one part."""
    scores = drawn.scores(logp)
    batch = DPO.batch(scores, DPO.config(**trainer))
    loss = catalogue().make(Group.LOSS, name)
    # δ of `bco_pair` is 0 before any step.
    config = loss.config(**options)
    output = loss(batch, config, {}, loss.begin(config))
    roles = {"chosen": int(drawn.lengths[:PAIRS].sum()), "rejected": int(drawn.lengths[PAIRS:].sum())}
    counts = Counts(int(drawn.lengths.sum()), 2 * PAIRS, PAIRS, roles)
    part = Part(scores.sequence, scores.lengths, PAIRS, counts)
    return torch.stack([term.weight * term.reduction.total(term.values, part) for term in output.terms]).sum()


def assert_alike(
    seed: int, name: str, options: Mapping[str, Any], their: Mapping[str, Any], **trainer: Any
) -> None:
    drawn = Drawn(seed)
    first, second = (drawn.policy.clone().requires_grad_() for _ in range(2))
    expected, found = (
        theirs(drawn, first, loss_types=[name], **their),
        mine(drawn, second, name, options, **trainer),
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    expected.backward()
    found.backward()
    assert first.grad is not None and second.grad is not None
    largest = float(first.grad.abs().max())
    assert largest > 1e-6
    assert float((first.grad - second.grad).abs().max()) <= 1e-5 * largest


SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
"""Losses that must have a label smoothing."""


def registered() -> list[str]:
    losses = {name: catalogue().load(Group.LOSS, name) for name in catalogue().names(Group.LOSS)}
    pairs = {name: loss for name, loss in losses.items() if loss.family is Family.PREFERENCE}
    # What trl 1.16 has not is compared in test_parity_online.py.
    compared = {
        name for name, loss in pairs.items() if loss.needs_reference and Need.AUTHORS not in loss.needs
    }
    return [name for name in pairs if name in compared or name == "sft"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("name", registered())
def test_every_loss(name: str, beta: float, seed: int):
    smoothing = {"label_smoothing": SMOOTHED[name]} if name in SMOOTHED else {}
    options = {} if name == "sft" else {"beta": beta, **smoothing}
    assert_alike(seed, name, options, {"beta": beta, **smoothing})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("aot", {"label_smoothing": 0.2}),
        ("aot_unpaired", {"label_smoothing": 0.2}),
        ("exo_pair", {"label_smoothing": 0.3}),
        ("robust", {"label_smoothing": 0.3}),
        ("discopop", {"discopop_tau": 0.4}),
    ],
)
def test_options(name: str, options: dict[str, float]):
    assert_alike(5, name, options, options)


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize(
    "name", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"]
)
def test_divergences(name: str, kind: str):
    smoothing = {"label_smoothing": SMOOTHED[name]} if name in SMOOTHED else {}
    alpha = {"f_alpha_divergence_coef": 0.3} if kind == "alpha_divergence" else {}
    options = {"f_divergence_type": kind, **smoothing, **alpha}
    assert_alike(6, name, options, options)


PLAIN = [name for name in registered() if name != "sft"]


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("name", PLAIN)
def test_length_desensitized(name: str, alpha: float):
    smoothing = {"label_smoothing": SMOOTHED[name]} if name in SMOOTHED else {}
    assert_alike(7, name, smoothing, {"ld_alpha": alpha, **smoothing}, ld_alpha=alpha)


@pytest.mark.parametrize("name", sorted({*PLAIN} - {"aot", "aot_unpaired", "hinge"}))
def test_weighted_by_the_policy(name: str):
    smoothing = {"label_smoothing": SMOOTHED[name]} if name in SMOOTHED else {}
    assert_alike(8, name, smoothing, {"use_weighting": True, **smoothing}, weighting="wpo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"), hidden_size=32)


Curve = tuple[dict[str, Any], dict[str, Any], int]
"""Options of either side, and rows of a micro-batch of trl's: those of a step where its losses mix them."""


def curve(name: str) -> Curve:
    options = {"beta": 0.3, **({"label_smoothing": SMOOTHED[name]} if name in SMOOTHED else {})}
    whole = catalogue().load(Group.LOSS, name).scope is Scope.STEP
    return {"loss": {"name": name, **options}}, {"loss_type": [name], **options}, 4 if whole else 2


CURVES: Mapping[str, Curve] = {
    # The shift of bco_pair follows the rewards from step to step, which trl's has not.
    **{name: curve(name) for name in PLAIN if name != "bco_pair"},
    "mixture": (
        {
            "loss": [{"name": "sigmoid", "beta": 0.3}, {"name": "apo_zero", "beta": 0.3}, "sft"],
            "loss_weights": [0.8, 0.2, 0.1],
        },
        {"loss_type": ["sigmoid", "apo_zero", "sft"], "loss_weights": [0.8, 0.2, 0.1], "beta": 0.3},
        4,
    ),
    "ld": ({"loss": {"beta": 0.3}, "ld_alpha": 0.4}, {"beta": 0.3, "ld_alpha": 0.4}, 2),
    "wpo": ({"loss": {"beta": 0.3}, "weighting": "wpo"}, {"beta": 0.3, "use_weighting": True}, 2),
}


@pytest.mark.parametrize("name", CURVES)
def test_twenty_steps(tmp_path: Path, model: Artifact, name: str):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    own, their, rows = CURVES[name]
    data = preference_rows(12)
    policy = load_model(model.path, "float32")
    trainer = DPOTrainer(
        model=policy,
        ref_model=load_model(model.path, "float32"),
        args=trl_arguments(DPOConfig, tmp_path / "trl", "train.dpo", rows, 4 // rows, **their),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(model),
    )
    assert_same_tokens(trainer.train_dataset, data, Encoder.open(model.path))
    losses = trl_losses(trainer)
    context = ours(tmp_path, "train.dpo", model, data, "preference", **own)
    assert max(losses) - min(losses) > 0.01
    assert_same_run(context, tmp_path, losses, policy)
