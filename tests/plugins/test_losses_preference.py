"""Losses over pairs with a reference: worked out by hand, at the start, and at numbers as large as they get."""

from __future__ import annotations

import doctest
import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.contexts import catalogue
from pydantic import ValidationError

from posttrain.contracts.loss import Family, PreferenceBatch
from posttrain.contracts.registration import Group
from posttrain_plugins.losses.preference.divergence import DivergenceOptions, scores
from posttrain_plugins.testing.batches import batch_of
from posttrain_plugins.testing.worked import worked

LN2 = math.log(2)
AT_THE_START: Mapping[str, float] = {
    "sigmoid": LN2,
    "sigmoid_norm": LN2,
    "robust": LN2,
    "aot": LN2,
    "aot_unpaired": LN2,
    "hinge": 1.0,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "ipo": 25.0,
    "sppo_hard": 50.0,
    "nca_pair": 2 * LN2,
    "bco_pair": 2 * LN2,
    "discopop": LN2 / 2 + 0.5,
    "exo_pair": -0.5 * math.log(4 * 1e-3 * (1 - 1e-3)),
    "xpo": LN2 - 1e-5 * 13 / 3,
    "nash_md": 0.5 * 12.5 / 3,
}
"""What each loss's formula gives where the policy is its own reference, with its default options."""

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def losses(family: Family = Family.PREFERENCE, reference: bool = True) -> list[str]:
    loaded = {name: catalogue().load(Group.LOSS, name) for name in catalogue().names(Group.LOSS)}
    return [
        name for name, loss in loaded.items() if (loss.family, loss.needs_reference) == (family, reference)
    ]


def configs() -> list[tuple[str, dict[str, Any]]]:
    """Every loss with its default options, and with each divergence that it takes."""
    plain: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in losses()]
    takes = [name for name in losses() if issubclass(loss_of(name).config, DivergenceOptions)]
    return plain + [(name, {"f_divergence_type": kind}) for name in takes for kind in DIVERGENCES[1:]]


def loss_of(name: str) -> Any:
    return catalogue().load(Group.LOSS, name)


def pairs(
    chosen: list[float], rejected: list[float], dtype: torch.dtype = torch.float64, **more: Any
) -> PreferenceBatch:
    """Pairs with these log-ratios."""
    batch: PreferenceBatch = batch_of(
        Family.PREFERENCE,
        dtype,
        chosen=torch.tensor(chosen, dtype=dtype),
        rejected=torch.tensor(rejected, dtype=dtype),
        **more,
    )
    batch.chosen.requires_grad_()
    batch.rejected.requires_grad_()
    return batch


def values(
    name: str, batch: PreferenceBatch, options: Mapping[str, Any] = {}, state: Any = None
) -> torch.Tensor:
    loss = loss_of(name)()
    config = loss.config(**options)
    (term,) = loss(batch, config, {}, loss.begin(config) if state is None else state).terms
    return term.values


@pytest.mark.parametrize("name", losses() + losses(reference=False))
def test_the_example_of_its_docstring_comes_to_what_it_says(name: str):
    loss = loss_of(name)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        loss, name, globs=dict(vars(sys.modules[loss.__module__]))
    )
    assert any("worked(" in example.source for example in test.examples)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("name", losses())
def test_at_the_start_it_is_what_its_formula_gives(name: str):
    same = {"chosen": [-3.0, -9.0, -0.5], "rejected": [-5.0, -1.0, -7.0], "chosen_tokens": [3, 4, 1]}
    reference = {"reference_chosen": same["chosen"], "reference_rejected": same["rejected"]}
    assert worked(loss_of(name), {}, **same, **reference) == pytest.approx(AT_THE_START[name], abs=1e-4)


@pytest.mark.parametrize(("name", "options"), configs())
def test_at_the_start_divergences_make_no_difference(name: str, options: dict[str, Any]):
    same = {"chosen": [-3.0], "rejected": [-5.0], "reference_chosen": [-3.0], "reference_rejected": [-5.0]}
    assert worked(loss_of(name), options, **same) == worked(loss_of(name), {}, **same)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ell(x: float) -> float:
    """−log σ(x)."""
    return math.log1p(math.exp(-x))


C, R = 0.7, -0.4
"""βr of the chosen and of the rejected answer in the table below: β = 0.5, log-ratios 1.4 and −0.8."""
BY_HAND: list[tuple[str, dict[str, Any], float]] = [
    ("sigmoid", {}, ell(1.1)),
    ("sigmoid", {"label_smoothing": 0.2}, 0.8 * ell(1.1) + 0.2 * ell(-1.1)),
    ("hinge", {}, 0.0),
    ("hinge", {"beta": 0.25}, 1 - 0.55),
    # Tokens: 2 of the chosen answer, 4 of the rejected one.
    ("ipo", {}, (1.4 / 2 + 0.8 / 4 - 1) ** 2),
    ("sigmoid_norm", {}, ell(0.5 * (1.4 / 2 + 0.8 / 4))),
    (
        "exo_pair",
        {"label_smoothing": 0.2},
        sigma(1.1) * math.log(sigma(1.1) / 0.8) + sigma(-1.1) * math.log(sigma(-1.1) / 0.2),
    ),
    ("nca_pair", {}, ell(C) + 0.5 * ell(-C) + 0.5 * ell(-R)),
    ("robust", {"label_smoothing": 0.2}, (0.8 * ell(1.1) - 0.2 * ell(-1.1)) / 0.6),
    ("bco_pair", {}, ell(C) + ell(-R)),
    ("sppo_hard", {}, (1.4 - 1) ** 2 + (-0.8 + 1) ** 2),
    ("aot", {}, ell(1.1)),
    ("aot_unpaired", {"label_smoothing": 0.2}, 0.8 * ell(1.1) + 0.2 * ell(-1.1)),
    ("apo_zero", {}, 1 - sigma(C) + sigma(R)),
    ("apo_down", {}, sigma(C) + 1 - sigma(1.1)),
    # The policy wrote the chosen answer, which is certainly preferred.
    ("xpo", {"alpha": 0.1}, ell(1.1) - 0.1 * 0.8),
    ("nash_md", {}, -(0.5 - 0.5 * 1.4) * 1.4),
    ("nash_md", {"kl": "token"}, 0.5 * 2 * 0.7**2 - 0.5 * 1.4),
    ("discopop", {"discopop_tau": 0.5}, (1 - sigma(2.2)) * ell(1.1) + sigma(2.2) * math.exp(-1.1)),
]


@pytest.mark.parametrize(("name", "options", "expected"), BY_HAND)
def test_values_worked_out_by_hand(name: str, options: dict[str, Any], expected: float):
    batch = pairs([1.4], [-0.8], chosen_tokens=[2], rejected_tokens=[4])
    found = values(name, batch, {"beta": 0.5, **options})
    assert found.item() == pytest.approx(expected, abs=1e-9)


def test_the_table_is_about_every_loss():
    assert {name for name, _, _ in BY_HAND} == set(losses()) == set(AT_THE_START)


ABSOLUTE = frozenset({"xpo", "nash_md"})
"""Losses of the likelihood of an answer too, and not of its log-ratio alone."""


@pytest.mark.parametrize(("name", "options"), [each for each in configs() if each[0] not in ABSOLUTE])
def test_a_reference_counts_as_what_it_takes_away(name: str, options: dict[str, Any]):
    plain = pairs([1.4, -3.0], [-0.8, 2.0], chosen_tokens=[2, 3])
    reference = {"reference_chosen": [-2.0, -2.0], "reference_rejected": [-1.0, -1.0]}
    referred = pairs([-0.6, -5.0], [-1.8, 1.0], chosen_tokens=[2, 3], **reference)
    assert torch.allclose(values(name, plain, options), values(name, referred, options))


HUGE = 1e4
EXTREMES = [(a, b) for a in (-HUGE, -50.0, 0.0, 50.0, HUGE) for b in (-HUGE, 0.0, HUGE)]


@pytest.mark.parametrize(("name", "options"), configs())
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_log_ratios_of_ten_thousand_stay_finite_in_float32(name: str, options: dict[str, Any], beta: float):
    batch = pairs([a for a, _ in EXTREMES], [b for _, b in EXTREMES], torch.float32)
    found = values(name, batch, {"beta": beta, **options})
    assert bool(found.isfinite().all())
    found.sum().backward()
    for side in (batch.chosen, batch.rejected):
        assert side.grad is not None and bool(side.grad.isfinite().all())


RISES_WITHOUT_END = ("sigmoid", "sigmoid_norm", "hinge", "robust", "aot", "aot_unpaired")


@pytest.mark.parametrize("options", [{}, *({"f_divergence_type": kind} for kind in DIVERGENCES[1:])])
@pytest.mark.parametrize("name", RISES_WITHOUT_END)
def test_the_gradient_pulls_a_hopeless_pair_the_right_way(name: str, options: dict[str, Any]):
    if not issubclass(loss_of(name).config, DivergenceOptions):
        options = {}
    batch = pairs([-HUGE], [1.0], torch.float32)
    values(name, batch, options).sum().backward()
    assert batch.chosen.grad.item() < 0 < batch.rejected.grad.item()


def test_conservative_and_robust_labels_are_not_mixed_up():
    pair = {"chosen": [-1.0], "rejected": [-3.0]}
    assert worked(loss_of("sigmoid"), {"beta": 0.1}, **pair) == pytest.approx(0.59814, abs=6e-5)
    smoothed = worked(loss_of("sigmoid"), {"beta": 0.1, "label_smoothing": 0.1}, **pair)
    assert smoothed == pytest.approx(0.61814, abs=6e-5)
    assert worked(loss_of("robust"), {"beta": 0.1, "label_smoothing": 0.1}, **pair) == pytest.approx(
        0.57314, abs=6e-5
    )


def test_robust_is_unbiased_over_swapped_labels():
    right, wrong = pairs([1.4], [-0.8]), pairs([-0.8], [1.4])
    options = {"label_smoothing": 0.3}
    mixed = 0.7 * values("robust", right, options) + 0.3 * values("robust", wrong, options)
    assert mixed.item() == pytest.approx(values("sigmoid", right).item())


@pytest.mark.parametrize("name", ["ipo", "sigmoid_norm"])
def test_saying_an_answer_twice_changes_nothing_where_log_ratios_are_by_token(name: str):
    once = pairs([1.4], [-0.8], chosen_tokens=[2], rejected_tokens=[4])
    twice = pairs([2.8], [-1.6], chosen_tokens=[4], rejected_tokens=[8])
    assert values(name, once).item() == pytest.approx(values(name, twice).item())
    assert values("sigmoid", once).item() != pytest.approx(values("sigmoid", twice).item())


def test_ipo_is_least_at_its_target():
    # β = 0.1: 1/(2β) = 5 nats a token.
    best = values("ipo", pairs([10.0], [0.0], chosen_tokens=[2], rejected_tokens=[7]))
    beyond = values("ipo", pairs([14.0], [0.0], chosen_tokens=[2], rejected_tokens=[7]))
    assert (best.item(), beyond.item()) == pytest.approx((0.0, 4.0))


def test_exo_is_least_where_the_policy_prefers_as_often_as_the_data():
    margins = torch.linspace(-3, 3, 601, dtype=torch.float64)
    batch = pairs(margins.tolist(), [0.0] * len(margins))
    found = values("exo_pair", batch, {"beta": 1.0, "label_smoothing": 0.2})
    assert float(margins[found.argmin()]) == pytest.approx(math.log(0.8 / 0.2), abs=0.01)
    assert float(found.detach().min()) == pytest.approx(0.0, abs=1e-5)


def test_divergences_worked_out_by_hand():
    ratio = pairs([1.0], [-1.0])

    def scored(kind: str, **more: Any) -> list[float]:
        return [side.item() for side in scores(ratio, DivergenceOptions(f_divergence_type=kind, **more))]

    assert scored("reverse_kl") == [1.0, -1.0]
    assert scored("forward_kl") == pytest.approx([1 - math.exp(-1), 1 - math.exp(1)])
    js = [math.log(2) + math.log(sigma(1)), math.log(2) + math.log(sigma(-1))]
    assert scored("js_divergence") == pytest.approx(js)
    alpha = [(math.exp(-0.5) - 1) / -0.5, (math.exp(0.5) - 1) / -0.5]
    assert scored("alpha_divergence") == pytest.approx(alpha)
    near = {"f_alpha_divergence_coef": 1e-6}
    assert scored("alpha_divergence", **near) == pytest.approx(scored("forward_kl"), rel=1e-5)
    near = {"f_alpha_divergence_coef": 1 - 1e-6}
    assert scored("alpha_divergence", **near) == pytest.approx([1.0, -1.0], rel=1e-5)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_scores_rise_with_the_log_ratio_also_where_they_are_continued(kind: str):
    ratios = torch.tensor([-HUGE, -500.0, -31.0, -30.0, -29.0, -1.0, 0.0, 1.0])
    batch = pairs(ratios.tolist(), ratios.tolist(), torch.float32)
    chosen, _ = scores(batch, DivergenceOptions(f_divergence_type=kind))
    assert bool((chosen.diff() > 0).all())
    (slope,) = torch.autograd.grad(chosen.sum(), batch.chosen)
    assert bool((slope > 0).all()) and bool(slope.isfinite().all())


BAD = [
    *((name, {"beta": bad}) for name in AT_THE_START for bad in (0, -0.1, math.inf)),
    *((name, {"label_smoothing": bad}) for name in ("sigmoid", "aot", "aot_unpaired") for bad in (0.5, -0.1)),
    *((name, {"label_smoothing": bad}) for name in ("robust", "exo_pair") for bad in (0, 0.5, -0.1)),
    *((name, {"label_smoothing": 0.1}) for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
    *((name, {"label_smoothing": 0.1}) for name in ("apo_zero", "apo_down", "discopop", "sigmoid_norm")),
    *((name, {"f_divergence_type": "js_divergence"}) for name in ("nca_pair", "bco_pair", "sppo_hard")),
    *((name, {"f_divergence_type": "js_divergence"}) for name in ("aot", "aot_unpaired", "apo_zero")),
    ("sigmoid", {"f_divergence_type": "kl"}),
    ("sigmoid", {"f_alpha_divergence_coef": 0.3}),
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1}),
    ("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0}),
    ("discopop", {"discopop_tau": 0}),
    ("discopop", {"discopop_tau": 1}),
    ("sft", {"beta": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), BAD)
def test_options_that_cannot_be_or_would_be_ignored_are_refused(name: str, options: dict[str, Any]):
    with pytest.raises(ValidationError):
        loss_of(name).config(**options)


def test_sft_is_by_token_of_the_chosen_answers_and_needs_no_reference():
    assert not loss_of("sft").needs
    pair = {"chosen": [-4.0, -2.0], "rejected": [-9.0, -9.0], "chosen_tokens": [1, 3]}
    assert worked(loss_of("sft"), **pair) == 1.5
    assert worked(loss_of("sft"), **pair, weight=[1.0, 0.0]) == 1.0
