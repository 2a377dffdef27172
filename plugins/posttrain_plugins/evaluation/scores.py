"""Point estimates with intervals, and the paired comparisons a gate rests on. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval and the number of units it was taken over."""

    value: float
    count: int
    low: float
    high: float

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the four fields for a report; an unbounded end is None, because JSON has no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """A paired improvement of a candidate over a baseline; positive is better.

    Args:
        estimate: The mean improvement per item (or per token) with its interval.
        wins: Items that the candidate alone gets right (binary scores only).
        losses: Items that the baseline alone gets right (binary scores only).
        p_value: Two-sided p-value of "no difference"; exact for binary scores.
    """

    estimate: Estimate
    wins: int | None = None
    losses: int | None = None
    p_value: float | None = None


def proportion(successes: int, count: int, confidence: float = 0.95) -> Estimate:
    """Return a proportion with its Wilson score interval.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    Unlike the Wald interval it keeps its coverage near 0 and 1, where evaluations often are.
    """
    _need(count, 1)
    z = _z(confidence)
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # At the ends the interval reaches 0 or 1 exactly; rounding must not move it past the estimate.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return Estimate(share, count, low, high)


def ratio(totals: Sequence[float], weights: Sequence[int], confidence: float = 0.95) -> Estimate:
    """Return Σ totals / Σ weights with a t interval over items; weights of 1 give the mean.

    `count` is Σ weights. With one item the interval is unbounded. Items are the independent units, not
    tokens: the variance is the ratio estimator's, n/(n−1) · Σ (totalᵢ − R·weightᵢ)² / (Σ weights)² (W. G.
        Cochran, "Sampling Techniques",
    section 2.11).
    """
    items, weight = len(totals), sum(weights)
    _need(weight, 1)
    value = math.fsum(totals) / weight
    if items < 2:
        return Estimate(value, weight, -math.inf, math.inf)
    squares = math.fsum((total - value * w) ** 2 for total, w in zip(totals, weights, strict=True))
    half = (
        student_quantile(0.5 + confidence / 2, items - 1) * math.sqrt(squares * items / (items - 1)) / weight
    )
    return Estimate(value, weight, value - half, value + half)


def perplexity(nlls: Sequence[float], tokens: Sequence[int], confidence: float = 0.95) -> Estimate:
    """Return exp of the mean negative log-likelihood per token; the interval is exp of that mean's interval.

    Args:
        nlls: Σ −log p(token) of each item, in nats.
        tokens: Scored tokens of each item.
        confidence: Coverage of the interval.
    """
    inner = ratio(nlls, tokens, confidence)
    return Estimate(_exp(inner.value), inner.count, _exp(inner.low), _exp(inner.high))


def compare_binary(
    candidate: Sequence[bool], baseline: Sequence[bool], confidence: float = 0.95
) -> Comparison:
    """Compare two models' right and wrong answers to the same items.

    The interval is the Bonett–Price adjusted Wald interval for a paired difference of proportions (D. G.
    Bonett and R. M. Price, J. Educ. Behav. Stat. 37, 2012): one is added to each discordant count, so that
    two models that agree on every item do not get an interval of width zero. The p-value is McNemar's exact
    one.
    """
    pairs = list(zip(candidate, baseline, strict=True))
    _need(len(pairs), 1)
    wins = sum(1 for mine, theirs in pairs if mine and not theirs)
    losses = sum(1 for mine, theirs in pairs if theirs and not mine)
    count = len(pairs)
    up, down = (wins + 1) / (count + 2), (losses + 1) / (count + 2)
    half = _z(confidence) * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    estimate = Estimate(
        (wins - losses) / count, count, max(-1.0, up - down - half), min(1.0, up - down + half)
    )
    return Comparison(estimate, wins, losses, mcnemar(wins, losses))


def compare_ratios(
    candidate: Sequence[float], baseline: Sequence[float], weights: Sequence[int], confidence: float = 0.95
) -> Comparison:
    """Compare totals over the same items where lower is better: Σ (baseline − candidate) / Σ weights."""
    gains = [theirs - mine for mine, theirs in zip(candidate, baseline, strict=True)]
    return Comparison(ratio(gains, weights, confidence))


def mcnemar(wins: int, losses: int) -> float:
    """Return McNemar's exact two-sided p-value: a sign test on the discordant items.

    Q. McNemar, Psychometrika 12 (1947).
    """
    discordant = wins + losses
    if discordant == 0:
        return 1.0
    tail = sum(math.comb(discordant, k) for k in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**discordant))


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t for `probability` > 1/2 and `freedom` ≥ 1 degrees of freedom."""
    if freedom > 1000:
        # Next term of the Cornish–Fisher expansion; the error is below 1e-6 here.
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * freedom)
    return _bisect(lambda t: _student_two_sided(t, freedom) - (2 * probability - 1), 0.0, 1e6)


def _student_two_sided(t: float, freedom: int) -> float:
    """P(|T| ≤ t), by the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    if odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of an increasing function to the last bit that halving reaches."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _exp(nats: float) -> float:
    """Return exp, infinite where a float cannot hold it: an unbounded interval is no error."""
    return math.exp(nats) if nats < 709 else math.inf


def _need(count: int, least: int) -> None:
    if count < least:
        raise ValueError("an estimate needs at least one item")
