from __future__ import annotations

import doctest
import math
from importlib import import_module
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from posttrain.contracts.loss import Family, Loss, LossOutput, UnpairedBatch
from posttrain_plugins.losses.unpaired.apo_zero_unpaired import ApoZeroUnpaired
from posttrain_plugins.losses.unpaired.bco import Bco, BetaOptions
from posttrain_plugins.losses.unpaired.kto import Kto
from posttrain_plugins.losses.unpaired.options import SidedOptions
from posttrain_plugins.testing.batches import batch_of

LOSSES: dict[type[Loss], type[Any]] = {Kto: SidedOptions, ApoZeroUnpaired: SidedOptions, Bco: BetaOptions}
EVERY = pytest.mark.parametrize("loss", LOSSES)


def batch(logp: list[float], desirable: list[bool], **values: Any) -> UnpairedBatch:
    made = batch_of(Family.UNPAIRED, logp=logp, desirable=desirable, **values)
    made.logp.requires_grad_()
    return made


def called(loss: type[Loss], answers: UnpairedBatch, **options: Any) -> LossOutput:
    """Call a loss as the loop does in its first step, with these answers as all of it."""
    config, plugin = LOSSES[loss](**options), loss()
    state = plugin.begin(config)
    with torch.no_grad():
        stats = {name: value.double() for name, value in plugin.measure(answers, config, state).items()}
    return plugin(answers, config, stats, plugin.advance(state, stats, config))


def values(loss: type[Loss], answers: UnpairedBatch, **options: Any) -> list[float]:
    (term,) = called(loss, answers, **options).terms
    return term.values.tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_worked_out_by_hand():
    # r = 2 and −1; z = (1 + 3) / 2 = 2
    answers = batch(
        [-3.0, -2.0],
        [True, False],
        reference=[-5.0, -1.0],
        mismatched=[-4.0, -2.0],
        reference_mismatched=[-5.0, -5.0],
    )
    found = values(Kto, answers, beta=0.5, desirable_weight=3.0)
    assert found == pytest.approx([3 * sigmoid(0.0), sigmoid(0.5 * (-1 - 2))], abs=1e-12)


def test_the_divergence_is_not_negative_and_has_no_gradient():
    answers = batch([0.0], [True], mismatched=[-9.0], reference_mismatched=[-2.0])
    assert called(Kto, answers).metrics["kl"].item() == 0
    answers = batch([0.0], [True], mismatched=[-2.0])
    answers = UnpairedBatch(**{**vars(answers), "reference_mismatched": torch.tensor([-9.0])})
    answers.mismatched.requires_grad_()
    output = called(Kto, answers)
    assert output.metrics["kl"].item() == 7
    (slope,) = torch.autograd.grad(output.terms[0].values.sum(), [answers.mismatched], allow_unused=True)
    assert slope is None


def test_the_divergence_is_that_of_the_whole_step_and_not_of_its_last_part():
    config, kto = SidedOptions(), Kto()
    parts = [batch([0.0], [True], mismatched=[each]) for each in (1.0, 3.0, 11.0)]
    sums = [kto.measure(part, config, {}) for part in parts]
    stats = {name: sum(each[name].double() for each in sums) for name in sums[0]}
    output = kto(parts[0], config, stats, {})
    assert output.metrics["kl"].item() == pytest.approx(5.0)


def test_rows_without_another_answer_do_not_count():
    both = batch([0.0, 0.0], [True, False], mismatched=[4.0, float("nan")])
    assert called(Kto, both).metrics["kl"].tolist() == [4.0, 4.0]
    nobody = batch([0.0], [True], mismatched=[float("nan")])
    assert called(Kto, nobody).metrics["kl"].item() == 0
    assert called(Kto, batch([0.0], [True])).metrics["kl"].item() == 0


@EVERY
@pytest.mark.parametrize("good", [True, False])
def test_one_answer_alone_is_fine(loss: type[Loss], good: bool):
    output = called(loss, batch([-2.0], [good], reference=[-3.0], mismatched=[1.0]))
    assert output.terms[0].values.isfinite().all()
    present, absent = ("chosen", "rejected") if good else ("rejected", "chosen")
    assert len(output.metrics[f"rewards/{present}"]) == len(output.metrics[f"logps/{present}"]) == 1
    assert len(output.metrics[f"rewards/{absent}"]) == len(output.metrics[f"logps/{absent}"]) == 0


@pytest.mark.parametrize("loss", [Kto, ApoZeroUnpaired])
def test_weights_of_sides_change_the_gradient_by_exactly_that_factor(loss: type[Loss]):
    def slopes(**options: Any) -> list[float]:
        answers = batch([-1.0, -2.0, 0.5], [True, False, True], mismatched=[1.0, 2.0, 0.0])
        called(loss, answers, **options).terms[0].values.sum().backward()
        return answers.logp.grad.tolist()

    plain = slopes()
    assert slopes(desirable_weight=4.0) == [4 * plain[0], plain[1], 4 * plain[2]]
    assert slopes(undesirable_weight=0.5) == [plain[0], 0.5 * plain[1], plain[2]]
    assert plain[0] < 0 < plain[1]


@EVERY
def test_row_weights_multiply_values(loss: type[Loss]):
    numbers = {"reference": [-1.5, -1.5], "mismatched": [1.0, 2.0]}
    plain = values(loss, batch([-1.0, -2.0], [True, False], **numbers))
    weighed = values(loss, batch([-1.0, -2.0], [True, False], **numbers, weight=[0.25, 3.0]))
    assert weighed == [0.25 * plain[0], 3 * plain[1]]


@EVERY
def test_extreme_ratios_stay_finite(loss: type[Loss]):
    answers = batch_of(
        Family.UNPAIRED,
        torch.float32,
        logp=[1e4, -1e4, 1e4, -1e4],
        desirable=[True, True, False, False],
        mismatched=[-1e4, 1e4, 1e4, 1e4],
    )
    answers.logp.requires_grad_()
    (term,) = called(loss, answers, beta=1.0).terms
    term.values.sum().backward()
    assert term.values.isfinite().all() and answers.logp.grad.isfinite().all()


def test_apo_is_kto_without_a_divergence():
    numbers = {"logp": [-1.0, -2.0, 3.0], "desirable": [True, False, False], "reference": [-2.0, -1.0, 1.0]}
    assert values(ApoZeroUnpaired, batch(**numbers)) == values(Kto, batch(**numbers))


def test_bco_keeps_the_mean_of_all_rewards_so_far():
    config, bco = BetaOptions(beta=0.5), Bco()
    state = bco.begin(config)
    for logp, mean, count in (([2.0, 4.0], 1.5, 2), ([-6.0], 0.0, 3), ([8.0, 0.0, 0.0], 4 / 6, 6)):
        stats = bco.measure(batch_of(Family.UNPAIRED, logp=logp, desirable=[True] * len(logp)), config, state)
        state = bco.advance(state, stats, config)
        assert state == pytest.approx({"mean": mean, "answers": count})
    good, bad = (bco(batch([2.0], [label]), config, stats, state).terms[0].values for label in (True, False))
    assert good.item() == pytest.approx(math.log1p(math.exp(-(1 - 4 / 6))))
    assert bad.item() == pytest.approx(math.log1p(math.exp(1 - 4 / 6)))


def test_diagnostics():
    answers = batch(
        [-1.0, -4.0, -2.0], [True, False, True], reference=[-3.0, -3.0, -1.0], mismatched=[1.0] * 3
    )
    found = {name: each.tolist() for name, each in called(Kto, answers, beta=0.5).metrics.items()}
    assert found == {
        "rewards/chosen": [1.0, -0.5],
        "rewards/rejected": [-0.5],
        "rewards/accuracy": [1.0, 1.0, 0.0],
        "logps/chosen": [-1.0, -2.0],
        "logps/rejected": [-4.0],
        "kl": [1.0, 1.0, 1.0],
    }
    assert "delta" in called(Bco, answers).metrics


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (SidedOptions, {"beta": 0}),
        (SidedOptions, {"beta": -0.1}),
        (SidedOptions, {"desirable_weight": -1}),
        (SidedOptions, {"undesirable_weight": -1}),
        (SidedOptions, {"desirable_weight": 0, "undesirable_weight": 0}),
        (BetaOptions, {"beta": 0}),
        (BetaOptions, {"desirable_weight": 2}),
    ],
)
def test_impossible_options_are_refused(options: type[Any], given: dict[str, float]):
    with pytest.raises(ValidationError):
        options(**given)


@EVERY
def test_the_worked_example_is_right(loss: type[Loss]):
    found = doctest.testmod(import_module(loss.__module__))
    assert found.attempted > 0 and found.failed == 0
