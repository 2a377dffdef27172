from __future__ import annotations

import math

import pytest

from posttrain_plugins.evaluation import scores


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # centre (0.8 + 3.8415/20) / 1.38415, by hand
        (0, 10, 0.0, 0.277533),  # z² / (n + z²) = 3.8415 / 13.8415
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
    ],
)
def test_wilson_interval(successes: int, count: int, low: float, high: float) -> None:
    found = scores.proportion(successes, count)
    assert (found.value, found.count) == (successes / count, count)
    assert found.low == pytest.approx(low, abs=1e-6)
    assert found.high == pytest.approx(high, abs=1e-6)
    assert found.low <= found.value <= found.high


def test_wider_with_more_confidence_and_narrower_with_more_items() -> None:
    def width(estimate: scores.Estimate) -> float:
        return estimate.high - estimate.low

    assert (
        width(scores.proportion(5, 10, 0.99))
        > width(scores.proportion(5, 10))
        > width(scores.proportion(50, 100))
    )


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [(0, 0, 1.0), (1, 0, 1.0), (3, 0, 0.25), (8, 2, 2 * (1 + 10 + 45) / 1024), (2, 8, 0.109375), (4, 4, 1.0)],
)
def test_mcnemar_counts(wins: int, losses: int, p_value: float) -> None:
    assert scores.mcnemar(wins, losses) == pytest.approx(p_value)


def test_mcnemar_holds_thousands_of_items() -> None:
    assert scores.mcnemar(3000, 2000) < 1e-40


def test_paired_difference_of_proportions() -> None:
    # 12 wins, 3 losses of 100: (13 - 4) / 102 ± 1.95996 · sqrt((17/102 − (9/102)²) / 102)
    candidate = [True] * 12 + [False] * 3 + [True] * 85
    baseline = [False] * 12 + [True] * 3 + [True] * 85
    found = scores.compare_binary(candidate, baseline)
    assert (found.wins, found.losses) == (12, 3)
    assert found.estimate.value == pytest.approx(0.09)
    assert found.estimate.low == pytest.approx(0.010881, abs=1e-5)
    assert found.estimate.high == pytest.approx(0.165590, abs=1e-5)
    assert found.p_value == pytest.approx(2 * (1 + 15 + 105 + 455) / 2**15)


def test_models_that_agree_on_everything_get_an_interval_with_width() -> None:
    found = scores.compare_binary([True, False, True], [True, False, True])
    assert found.estimate.low < 0 < found.estimate.high


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (999, 1.96234),
        (10**6, 1.959966),
    ],
)
def test_student_quantiles_of_the_tables(freedom: int, quantile: float) -> None:
    assert scores.student_quantile(0.975, freedom) == pytest.approx(quantile, rel=2e-6)


def test_ratio_interval_takes_items_as_units() -> None:
    # R = 6/4; residuals −0.5, 0.5, 0; sqrt(0.5 · 3/2) / 4 = 0.216506; t(2) = 4.302653
    found = scores.ratio([1.0, 2.0, 3.0], [1, 1, 2])
    assert (found.value, found.count) == (1.5, 4)
    assert found.high - found.value == pytest.approx(0.216506 * 4.302653, rel=1e-5)
    assert found.value - found.low == pytest.approx(0.216506 * 4.302653, rel=1e-5)


def test_perplexity_is_per_token_over_all_items() -> None:
    found = scores.perplexity([math.log(2) * 3, math.log(8)], [3, 1])
    assert found.value == pytest.approx(2 ** (6 / 4))
    assert found.count == 4
    assert 0 < found.low < found.value < found.high


def test_one_item_has_an_unbounded_interval_that_json_can_hold() -> None:
    found = scores.perplexity([1.0], [2]).as_dict()
    assert found == {"value": pytest.approx(math.exp(0.5)), "count": 2, "low": 0.0, "high": None}


def test_difference_of_likelihoods_is_paired() -> None:
    # The items differ wildly, the gains hardly: the interval is that of the gains.
    found = scores.compare_ratios([1.0, 11.0, 101.0], [2.0, 12.1, 101.9], [1, 1, 1]).estimate
    assert found.value == pytest.approx(1.0)
    assert found.high - found.value == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)


def test_no_items_is_no_estimate() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        scores.proportion(0, 0)
