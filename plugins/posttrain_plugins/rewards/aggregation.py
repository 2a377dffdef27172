"""From the steps of an answer to one number for all of it.

Steps are given as log-odds z; σ(z) is how likely the answer is right up to there. Products are computed in log space,
so that neither certain steps nor very many of them lose their digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from posttrain.errors import DataError

Aggregation = Literal["min", "product", "log_product", "mean", "last"]
"""`min`: the least likely step (Lightman et al. 2023 and Wang et al. 2024 find it and `product` about as good).
`product`: Π σ(z), how likely all steps are right, were they independent; it shrinks with every step.
`log_product`: Σ log σ(z) in nats, which does not vanish for long answers.
`mean`: of σ(z). `last`: the last step, as an outcome reward model would have it.
"""


def aggregate(log_odds: Sequence[float], aggregation: Aggregation) -> float:
    """Return one number for an answer.

    Args:
        log_odds: Of each step, that the answer is right up to there.
        aggregation: How they are put together.

    Raises:
        DataError: There is no step, or one has no number.

    Example:
        Three steps of probabilities 1/2, 3/4 and 9/10:

        >>> odds = [0.0, math.log(3), math.log(9)]
        >>> [round(aggregate(odds, each), 4) for each in AGGREGATIONS]
        [0.5, 0.3375, -1.0862, 0.7167, 0.9]
    """
    if not log_odds:
        raise DataError("an answer without steps has no reward", fix="leave such answers out, or abstain")
    if any(math.isnan(each) for each in log_odds):
        raise DataError("a step has no number", found=repr(list(log_odds))[:80])
    return AGGREGATIONS[aggregation](log_odds)


def probability(log_odds: float) -> float:
    """Return σ(z), without overflow for any z."""
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1 + odds)


def log_probability(log_odds: float) -> float:
    """Return log σ(z) in nats, exact for any z."""
    return min(log_odds, 0.0) - math.log1p(math.exp(-abs(log_odds)))


def _log_product(log_odds: Sequence[float]) -> float:
    return math.fsum(map(log_probability, log_odds))


def _mean(log_odds: Sequence[float]) -> float:
    return math.fsum(map(probability, log_odds)) / len(log_odds)


AGGREGATIONS: Mapping[Aggregation, Callable[[Sequence[float]], float]] = {
    "min": lambda log_odds: probability(min(log_odds)),
    "product": lambda log_odds: math.exp(_log_product(log_odds)),
    "log_product": _log_product,
    "mean": _mean,
    "last": lambda log_odds: probability(log_odds[-1]),
}
"""The ways there are, by name."""
