"""Losses over pairs without a reference: numbers worked out by hand, properties that tell them apart, extremes."""

from __future__ import annotations

from math import exp, expm1, log, log1p
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import Loss, PreferenceBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN, RoleTokenMean
from posttrain_plugins.losses.preference.alphapo import AlphaPo, AlphaPoOptions
from posttrain_plugins.losses.preference.cpo import Cpo, CpoOptions
from posttrain_plugins.losses.preference.orpo import Orpo, OrpoOptions, log1mexp, log_odds
from posttrain_plugins.losses.preference.simpo import Simpo, SimpoOptions
from posttrain_plugins.losses.token.nll import Nll
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.testing.stepping import Shown, take_step
from posttrain_plugins.testing.worked import worked

LOSSES: list[type[Loss]] = [Cpo, Simpo, AlphaPo, Orpo]
MEANS = [Simpo, AlphaPo, Orpo]
"""Those that take the mean log-prob of an answer's tokens."""
every_loss = pytest.mark.parametrize("loss", LOSSES)


def pairs(dtype: torch.dtype = torch.float64, **values: Any) -> PreferenceBatch:
    values = {"chosen": [-2.0, -1.0], "rejected": [-4.0, -9.0], **values}
    batch: PreferenceBatch = batch_of(Cpo.family, dtype, **values)
    for side in (batch.chosen, batch.rejected):
        side.requires_grad_()
    return batch


def step(loss: type[Loss], config: Any, batch: Any) -> torch.Tensor:
    return take_step(loss(), config, [Shown(batch, part_of(batch), batch)]).total


def value(loss: type[Loss], batch: PreferenceBatch, **options: Any) -> torch.Tensor:
    return step(loss, loss.config(**options), batch)


# Worked out by hand


def test_cpo_is_the_logistic_loss_of_sums_and_the_likelihood_of_chosen_tokens():
    batch = pairs(chosen_tokens=[4, 2], rejected_tokens=[1, 3], weight=[1.0, 0.5])
    found = value(Cpo, batch, beta=0.5, cpo_alpha=0.25)
    ranked = (log1p(exp(-0.5 * 2)) + 0.5 * log1p(exp(-0.5 * 8))) / 2
    learned = (2 + 0.5 * 1) / 6
    assert found.item() == pytest.approx(ranked + 0.25 * learned)
    found.backward()
    # ∂/∂chosen = −β σ(−βΔ) w / P − α w / tokens
    first = -0.5 / (1 + exp(1)) / 2 - 0.25 / 6
    second = 0.5 * (-0.5 / (1 + exp(4)) / 2 - 0.25 / 6)
    assert batch.chosen.grad.tolist() == pytest.approx([first, second])
    assert batch.rejected.grad.tolist() == pytest.approx([0.5 / (1 + exp(1)) / 2, 0.25 / (1 + exp(4)) / 2])


def test_cpo_without_its_likelihood_has_one_term():
    terms = Cpo()(pairs(), CpoOptions(cpo_alpha=0), {}, {}).terms
    assert [term.reduction for term in terms] == [EXAMPLE_MEAN]
    terms = Cpo()(pairs(), CpoOptions(cpo_alpha=0.5), {}, {}).terms
    assert [(term.reduction, term.weight) for term in terms] == [
        (EXAMPLE_MEAN, 1.0),
        (RoleTokenMean("chosen"), 0.5),
    ]


def test_the_two_spellings_of_simpos_margin():
    """Mean log-probs of −1 and −1.5, β = 2.5: 1.25 − 1.375 either way, and an absolute 0.55 is another loss."""
    answers = {"chosen": [-4.0], "chosen_tokens": [4], "rejected": [-3.0], "rejected_tokens": [2]}
    expected = log1p(exp(0.125))
    assert expected == pytest.approx(0.75760, abs=5e-6)
    for margin in ({"gamma": 1.375}, {"gamma_beta_ratio": 0.55}):
        assert value(Simpo, pairs(**answers), beta=2.5, **margin).item() == pytest.approx(expected)
    other = value(Simpo, pairs(**answers), beta=2.5, gamma=0.55).item()
    assert other == pytest.approx(log1p(exp(-0.7)))


def test_simpos_default_margin_is_half_of_beta_and_is_replaced_by_either_spelling():
    assert SimpoOptions(beta=3.0).margin == 1.5
    absolute = SimpoOptions(beta=3.0, gamma=0.25)
    assert (absolute.margin, absolute.gamma_beta_ratio) == (0.25, None)
    assert SimpoOptions.model_validate(absolute.model_dump()) == absolute
    assert SimpoOptions(gamma=None).margin == SimpoOptions().margin


@pytest.mark.parametrize(
    "options", [{"gamma": 1.0, "gamma_beta_ratio": 0.5}, {"gamma": None, "gamma_beta_ratio": None}]
)
def test_the_margin_needs_exactly_one_spelling(options: dict[str, Any]):
    with pytest.raises(ValidationError, match="exactly one of `gamma`"):
        SimpoOptions(**options)


def test_label_smoothing_mixes_in_the_swapped_pair():
    batch = pairs(chosen=[-1.0], rejected=[-2.0])
    expected = 0.75 * log1p(exp(-0.5)) + 0.25 * log1p(exp(0.5))
    assert value(Cpo, batch, beta=0.5, label_smoothing=0.25, cpo_alpha=0).item() == pytest.approx(expected)
    for loss in (Simpo, AlphaPo):
        plain = value(loss, batch, gamma=0)
        assert value(loss, batch, gamma=0, label_smoothing=0.25) > plain


@pytest.mark.parametrize("alpha", [2.0, 0.25, -0.5])
def test_alphapo_reshapes_the_reward(alpha: float):
    answers = {"chosen": [-3.0], "chosen_tokens": [2], "rejected": [-3.0], "rejected_tokens": [1]}

    def reward(logp: float) -> float:
        return (1 - exp(logp) ** -alpha) / alpha

    expected = log1p(exp(-(1.5 * (reward(-1.5) - reward(-3.0)) - 0.3)))
    found = value(AlphaPo, pairs(**answers), alpha=alpha, beta=1.5, gamma=0.3)
    assert found.item() == pytest.approx(expected)


def test_alphapo_with_a_small_alpha_is_simpo():
    batch = pairs(chosen_tokens=[2, 3], rejected_tokens=[4, 2])
    near = value(AlphaPo, batch, alpha=1e-7, beta=2.5, gamma=0.5)
    assert near.item() == pytest.approx(value(Simpo, batch, beta=2.5, gamma=0.5).item(), abs=1e-6)


def test_orpo_is_the_likelihood_of_chosen_tokens_and_the_weighted_odds():
    batch = pairs(chosen=[log(0.5) * 4], chosen_tokens=[4], rejected=[log(0.2) * 2], rejected_tokens=[2])
    found = value(Orpo, batch, beta=0.3)
    # odds are 1 and 1/4: −log σ(ln 4) = ln(1 + 1/4)
    assert found.item() == pytest.approx(log(2) + 0.3 * log(1.25))
    found.backward()
    # ∂ log odds / ∂ log p = 1 / (1 − p), and σ(−ln 4) = 1/5; the likelihood has a slope of −1/4 a token
    assert batch.chosen.grad.item() == pytest.approx(-0.25 - 0.3 / 5 / (1 - 0.5) / 4)
    assert batch.rejected.grad.item() == pytest.approx(0.3 / 5 / (1 - 0.2) / 2)


def test_orpos_first_term_is_supervised_fine_tuning_on_the_chosen_answers():
    batch = pairs(chosen_tokens=[4, 2], weight=[1.0, 0.5])
    learned, ranked = Orpo()(batch, OrpoOptions(beta=0.4), {}, {}).terms
    assert ranked.weight == 0.4
    logp = [-0.5] * 4 + [-0.5] * 2
    tokens = batch_of(Nll.family, logp=logp, weight=[1.0] * 4 + [0.5] * 2, example=[0] * 4 + [1] * 2)
    expected = step(Nll, Nll.config(), tokens)
    assert learned.reduction.total(learned.values, part_of(batch)).item() == pytest.approx(expected.item())


# Sums and means


@pytest.mark.parametrize("loss", MEANS)
def test_saying_an_answer_twice_changes_nothing_where_means_are_taken(loss: type[Loss]):
    once = pairs(chosen_tokens=[2, 3], rejected_tokens=[4, 1])
    twice = pairs(chosen=[-4.0, -2.0], rejected=[-8.0, -18.0], chosen_tokens=[4, 6], rejected_tokens=[8, 2])
    assert value(loss, once).item() == pytest.approx(value(loss, twice).item())


def test_saying_an_answer_twice_changes_cpo():
    once, twice = pairs(), pairs(chosen=[-4.0, -2.0], chosen_tokens=[2, 2])
    assert value(Cpo, once).item() != pytest.approx(value(Cpo, twice).item(), abs=1e-3)


@every_loss
def test_the_reference_does_not_matter(loss: type[Loss]):
    given = pairs(reference_chosen=[-7.0, 1.0], reference_rejected=[-3.0, -2.0])
    assert not loss.needs_reference
    assert value(loss, given).item() == value(loss, pairs()).item()


@every_loss
def test_likelier_chosen_and_less_likely_rejected_answers_cost_less(loss: type[Loss]):
    batch = pairs(chosen_tokens=[2, 3], rejected_tokens=[4, 1])
    value(loss, batch).backward()
    assert (batch.chosen.grad < 0).all() and (batch.rejected.grad > 0).all()


@every_loss
def test_row_weights_multiply_every_term(loss: type[Loss]):
    plain, weighed = pairs(), pairs(weight=[0.0, 3.0])
    one = loss()(plain, loss.config(), {}, {}).terms
    other = loss()(weighed, loss.config(), {}, {}).terms
    for a, b in zip(one, other, strict=True):
        assert b.values.tolist() == pytest.approx([0.0, 3 * a.values[1].item()])


# Extremes


def test_log1mexp_near_probability_one_and_zero():
    logp = torch.tensor([-1e-8, -0.5, -log(2), -5.0, -100.0])
    assert log1mexp(logp)[0].item() == pytest.approx(-18.4207, abs=1e-4)
    expected = [log(-expm1(x)) for x in logp.double().tolist()]
    assert log1mexp(logp).tolist() == pytest.approx(expected, rel=1e-6)


def test_orpo_is_finite_for_every_probability():
    logp = torch.tensor([-0.0, -1e-12, -1e-8, -1e-4, -0.1, -1.0, -20.0, -100.0, -1e4])
    chosen = logp.repeat_interleave(len(logp)).requires_grad_()
    rejected = logp.repeat(len(logp)).requires_grad_()
    batch = batch_of(Orpo.family, torch.float32, chosen=chosen, rejected=rejected)
    for term in Orpo()(batch, OrpoOptions(), {}, {}).terms:
        assert term.values.isfinite().all()
        slopes = torch.autograd.grad(term.values.sum(), [chosen, rejected], allow_unused=True)
        assert all(slope is None or slope.isfinite().all() for slope in slopes)


def test_log_odds_rise_with_the_probability_up_to_certainty():
    logp = -torch.logspace(4, -12, 200)
    assert (log_odds(logp).diff() > 0).all()


def test_odds_are_computed_in_float32_whatever_the_log_probs_are_in():
    batch = pairs(torch.bfloat16, chosen=[-1e-8], rejected=[-1.0])
    _, ranked = Orpo()(batch, OrpoOptions(), {}, {}).terms
    assert ranked.values.dtype == torch.float32
    exact = pairs(torch.float32, chosen=batch.chosen.float().tolist(), rejected=[-1.0])
    _, expected = Orpo()(exact, OrpoOptions(), {}, {}).terms
    assert ranked.values.item() == expected.values.item()


@every_loss
def test_log_probs_of_ten_thousand_nats_are_finite_and_pull_the_right_way(loss: type[Loss]):
    ends = torch.tensor([-1e4, -1e-3])
    batch = pairs(torch.float32, chosen=ends.repeat_interleave(2).tolist(), rejected=ends.repeat(2).tolist())
    found = value(loss, batch)
    found.backward()
    assert found.isfinite()
    assert batch.chosen.grad.isfinite().all() and batch.rejected.grad.isfinite().all()
    assert (batch.chosen.grad <= 0).all() and (batch.rejected.grad >= 0).all()


# Options and metrics


@pytest.mark.parametrize("model", [CpoOptions, SimpoOptions, AlphaPoOptions, OrpoOptions])
@pytest.mark.parametrize("beta", [0, -0.1, float("nan"), float("inf")])
def test_a_beta_that_is_not_positive_is_refused(model: Any, beta: float):
    with pytest.raises(ValidationError):
        model(beta=beta)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (CpoOptions, {"cpo_alpha": -1}),
        (CpoOptions, {"label_smoothing": 0.5}),
        (SimpoOptions, {"gamma": -0.5}),
        (SimpoOptions, {"gamma_beta_ratio": -0.5}),
        (AlphaPoOptions, {"alpha": 0}),
        (OrpoOptions, {"label_smoothing": 0.1}),
    ],
)
def test_impossible_options_are_refused(model: Any, options: dict[str, float]):
    with pytest.raises(ValidationError):
        model(**options)


@pytest.mark.parametrize(
    ("loss", "rewards"), [(Cpo, (-1.0, -2.0)), (Simpo, (-0.25, -1.0)), (Orpo, (-0.25, -1.0))]
)
def test_metrics(loss: type[Loss], rewards: tuple[float, float]):
    batch = pairs(chosen=[-2.0], rejected=[-4.0], chosen_tokens=[4], rejected_tokens=[2])
    metrics = loss()(batch, loss.config(beta=0.5), {}, {}).metrics
    chosen, rejected = rewards
    assert {name: metrics[name].item() for name in metrics if name.startswith("rewards/")} == pytest.approx(
        {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": 1.0,
        }
    )
    assert (metrics["logps/chosen"].item(), metrics["logps/rejected"].item()) == (-2.0, -4.0)
    assert not any(each.requires_grad for each in metrics.values())


def test_orpo_tells_its_odds_and_likelihood():
    batch = pairs(chosen=[log(0.5)], rejected=[log(0.2)])
    metrics = Orpo()(batch, OrpoOptions(), {}, {}).metrics
    assert metrics["odds/log_ratio"].item() == pytest.approx(log(4))
    assert metrics["nll/chosen"].item() == pytest.approx(log(2))


def test_worked_numbers_of_a_whole_step():
    assert worked(Cpo, {"beta": 1.0, "cpo_alpha": 0.0}, chosen=[0.0, -1.0], rejected=[0.0, -1.0]) == 0.6931
