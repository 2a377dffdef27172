"""What train.dpo does to the numbers of every loss: tokens beyond the shorter answer, weights by the policy, step 0."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from helpers.losses import mixture
from helpers.stepping import assert_same, examples, gradient, stepper
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.contracts.loss import AnswerTokens, Family, Need, PreferenceBatch
from posttrain.contracts.registration import Group
from posttrain_plugins.losses.preference.bco_pair import BcoPair
from posttrain_plugins.losses.preference.sft import Sft
from posttrain_plugins.testing.batches import batch_of
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.weighting import desensitized, policy_weights

DPO = Dpo()


def one_pair() -> PreferenceBatch:
    """A chosen answer of 3 tokens, a rejected one of 1, and a second pair of equal lengths."""
    tokens = AnswerTokens(
        logp=torch.tensor([-1.0, -2.0, -4.0, -3.0, -5.0, -6.0], requires_grad=True),
        example=torch.tensor([0, 0, 0, 0, 1, 1]),
        answer=torch.tensor([0, 0, 0, 1, 0, 1]),
        place=torch.tensor([0, 1, 2, 0, 0, 0]),
        reference=torch.tensor([-0.5, -1.5, -2.5, -1.0, -2.0, -2.0]),
        squares=torch.tensor([1.0, 0.5, 0.25, 0.5, 1.0, 1.0]).exp(),
    )
    batch: PreferenceBatch = batch_of(
        Family.PREFERENCE,
        torch.float32,
        chosen=torch.tensor([-7.0, -5.0]),
        rejected=torch.tensor([-3.0, -6.0]),
        reference_chosen=torch.tensor([-4.5, -2.0]),
        reference_rejected=torch.tensor([-1.0, -2.0]),
        chosen_tokens=[3, 1],
        rejected_tokens=[1, 1],
    )
    return replace(batch, tokens=tokens)


def test_tokens_beyond_the_other_answer_count_less_under_policy_and_reference():
    plain = one_pair()
    found = desensitized(plain, 0.25)
    assert found.chosen.tolist() == [-1.0 - 0.25 * 6, -5.0]
    assert found.rejected.tolist() == [-3.0, -6.0]
    assert found.reference_chosen.tolist() == [-0.5 - 0.25 * 4, -2.0]
    assert found.reference_rejected.tolist() == [-1.0, -2.0]
    assert plain.tokens is not None and found.tokens is not None
    assert found.tokens.logp.tolist() == [-1.0, -0.5, -1.0, -3.0, -5.0, -6.0]
    assert found.tokens.reference is not None
    assert found.tokens.reference.tolist() == [-0.5, -0.375, -0.625, -1.0, -2.0, -2.0]
    found.chosen[0].backward()
    assert plain.tokens.logp.grad is not None
    assert plain.tokens.logp.grad.tolist() == [1.0, 0.25, 0.25, 0.0, 0.0, 0.0]


def test_where_all_count_alike_they_are_what_they_were():
    plain, found = one_pair(), desensitized(one_pair(), 1.0)
    for name in ("chosen", "rejected", "reference_chosen", "reference_rejected"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


def test_a_pair_weighs_what_the_policy_makes_of_its_answers():
    # log Σp² is 1, ½, ¼ | ½ | 1 | 1: means of log π − log Σp² are −8.75/3 and −3.5; −6 and −7.
    found = policy_weights(one_pair())
    assert found.tolist() == pytest.approx([math.exp(-8.75 / 3 - 3.5), math.exp(-13)])
    assert not found.requires_grad


def test_an_answer_of_certain_tokens_weighs_one():
    tokens = AnswerTokens(*torch.zeros(4, 2), squares=torch.ones(2))
    tokens = replace(tokens, example=torch.tensor([0, 0]), answer=torch.tensor([0, 1]))
    pair = replace(batch_of(Family.PREFERENCE, chosen=[0.0], rejected=[0.0]), tokens=tokens)
    assert policy_weights(pair).tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"ld_alpha": 0.0}, {Need.REFERENCE_TOKENS}),
        ({"weighting": "wpo"}, {Need.SQUARES}),
        ({"ld_alpha": 0.3, "weighting": "wpo"}, {Need.REFERENCE_TOKENS, Need.SQUARES}),
    ],
)
def test_it_asks_for_what_its_options_need(options: dict[str, Any], needs: set[Need]):
    assert DPO.needs(DPO.config(**options)) == needs


def made(loss: str, tokens: int = 10_000, plugin: Any = None, layout: str = "padded", **options: Any) -> Any:
    """A stepper whose reference is what its policy says before the first update."""
    found = stepper("train.dpo", loss, tokens, layout, plugin=plugin)
    found.config, found.reference = DPO.config(**options), None
    found.__dict__.pop("needs", None)
    rows = examples("train.dpo")
    score = found.log_probs if Need.REFERENCE_TOKENS in found.needs else found.totals
    found.reference = score(rows, lambda done: None)
    return found


BOTH = {"ld_alpha": 0.3, "weighting": "wpo"}


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "aot_unpaired", "mixture"])
def test_neither_cut_nor_layout_changes_what_is_weighed(loss: str):
    rows = examples("train.dpo")
    plugin = mixture(BcoPair, Sft) if loss == "mixture" else None
    whole = made(loss, plugin=plugin, **BOTH)
    shifted = {row: values - 0.3 for row, values in whole.reference.items()}
    whole.reference = shifted
    expected, metrics, slopes = gradient(whole, rows)
    cut = made(loss, 1, plugin, "shared_prefix", **BOTH)
    cut.reference = shifted
    found, others, parts = gradient(cut, rows)
    assert found == pytest.approx(expected, rel=1e-5)
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert_same(parts, slopes)


@pytest.mark.parametrize("option", [{"ld_alpha": 0.3}, {"weighting": "wpo"}])
def test_each_option_changes_the_gradient(option: dict[str, Any]):
    rows = examples("train.dpo")
    plain, other = made("sigmoid"), made("sigmoid", **option)
    first, second = gradient(plain, rows)[2], gradient(other, rows)[2]
    assert max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) > 1e-4


def referenced() -> list[str]:
    """Losses of log-ratios alone; those that ask who wrote an answer are of its likelihood too."""
    losses = {name: catalogue().load(Group.LOSS, name) for name in catalogue().names(Group.LOSS)}
    pairs = {name: loss for name, loss in losses.items() if loss.family is Family.PREFERENCE}
    return [
        name
        for name, loss in pairs.items()
        if Need.REFERENCE in loss.needs and Need.AUTHORS not in loss.needs
    ]


@pytest.mark.parametrize("options", [{}, {"ld_alpha": 0.3}], ids=["plain", "ld"])
@pytest.mark.parametrize("loss", referenced())
def test_before_the_first_update_the_policy_is_its_reference(loss: str, options: dict[str, Any]):
    plugin = catalogue().make(Group.LOSS, loss)
    zeros = batch_of(Family.PREFERENCE, chosen=[0.0], rejected=[0.0])
    config = plugin.config()
    (term,) = plugin(zeros, config, {}, plugin.begin(config)).terms
    rows = [replace(row, weight=1.0) for row in examples("train.dpo")]
    assert made(loss, **options).evaluate(rows).loss == pytest.approx(term.values.item(), rel=1e-5)


@pytest.mark.parametrize("adapter", [{}, {"lora": {"r": 2}}], ids=["full", "lora"])
def test_a_training_with_all_of_it_starts_at_ln_2_and_learns(tmp_path: Path, adapter: dict[str, Any]):
    model = model_artifact(tmp_path / "model")
    options = {"ld_alpha": 0.3, "loss": ["sigmoid", "aot"], "loss_weights": [0.75, 0.25], **adapter}
    context = context_for(
        tmp_path, "train.dpo", model, preference_rows(6), "preference", max_steps=6, batch_size=6, **options
    )
    train(context)
    assert context.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert context.losses[-1] < context.losses[0]
