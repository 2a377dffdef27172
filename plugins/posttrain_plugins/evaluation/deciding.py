"""What would decide a gate that could not: which interval holds which demand, and roughly how many rows it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from posttrain.contracts.stage import Verdict
from posttrain_plugins.evaluation.scores import Estimate
from posttrain_plugins.evaluation.verdicts import Demands, Judgement


def undecided(judgement: Judgement, demands: Demands) -> Iterator[str]:
    """Yield what leaves each demand that is not decided open, and what would decide it."""
    for name, verdict in judgement.verdicts.items():
        if verdict is Verdict.INCONCLUSIVE:
            yield from _OPEN[name](judgement, demands)


def factor(estimate: Estimate, demand: float) -> float:
    """Return how many times as many rows would move the interval off the demand, were the estimate to stay.

    The width of an interval falls with the root of the number of rows. Infinite where the estimate is the demand.
    """
    away = estimate.value - demand
    reach = estimate.value - (estimate.low if away > 0 else estimate.high)
    return math.inf if away == 0 or not math.isfinite(reach) else max(1.0, (reach / away) ** 2)


def _threshold(judgement: Judgement, demands: Demands) -> Iterator[str]:
    demand = demands.threshold or 0.0
    told = f"its value {_interval(judgement.value)} does not settle on a side of the threshold {demand:g}"
    yield f"{told}; {_rows(factor(judgement.value, demand), judgement.rows)}"


def _improvement(judgement: Judgement, demands: Demands) -> Iterator[str]:
    assert judgement.comparison is not None, "only a comparison has an improvement"
    estimate, exact = judgement.comparison.estimate, judgement.comparison.p_value
    if estimate.low > demands.min_improvement and exact is not None:
        told = f"the exact test finds p = {exact:.3g}, and {1 - demands.confidence:.3g} at most would pass"
        quantile = NormalDist().inv_cdf
        found, wanted = quantile(1 - exact / 2), quantile(0.5 + demands.confidence / 2)
        times = math.inf if found <= 0 else (wanted / found) ** 2
    else:
        told = (
            f"the improvement {_interval(estimate)} does not settle on a side of the {demands.min_improvement:g} "
            "that it must exceed"
        )
        times = factor(estimate, demands.min_improvement)
    yield f"{told}; {_rows(times, judgement.rows)}"


_OPEN = {"threshold": _threshold, "improvement": _improvement}


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _rows(times: float, rows: int) -> str:
    if not math.isfinite(times):
        return f"{rows} rows say nothing of which side it is on"
    return f"about {_rounded(times * rows)} rows instead of {rows} would, if it stays as it is"


def _rounded(number: float) -> int:
    """Round up to two digits: more would say more than is known."""
    step: int = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / step) * step
