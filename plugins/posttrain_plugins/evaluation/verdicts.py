"""From a report's items to verdicts: the judging that `gate` does, without files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.contracts.stage import Verdict
from posttrain.errors import StageError
from posttrain_plugins.evaluation.report import Item, Metric, counts_of, estimate
from posttrain_plugins.evaluation.scores import Comparison, Estimate, compare_binary, compare_ratios

SIGN = {Metric.EXACT_MATCH: 1, Metric.PERPLEXITY: -1, Metric.PAIR_ACCURACY: 1, Metric.STEP_ACCURACY: 1}
"""1 where higher values of a metric are better, -1 where lower ones are."""

_ORDER = (Verdict.COMPLETED, Verdict.INCONCLUSIVE, Verdict.REJECTED)


@dataclass(frozen=True)
class Demands:
    """What a candidate has to meet.

    Args:
        metric: What is compared.
        min_improvement: The improvement over the baseline must exceed this.
        threshold: The value itself must be better than this.
        confidence: Coverage of the intervals that decide.
    """

    metric: Metric
    min_improvement: float = 0.0
    threshold: float | None = None
    confidence: float = 0.95


@dataclass(frozen=True)
class Judgement:
    """What was found about one candidate.

    Args:
        digest: The candidate.
        value: Its value of the metric.
        baseline: The baseline's value.
        comparison: The paired improvement over the baseline.
        verdicts: A verdict for each demand: `threshold`, `improvement`.
        rows: How many rows it was judged on.
    """

    digest: str
    value: Estimate
    baseline: Estimate | None = None
    comparison: Comparison | None = None
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    rows: int = 0

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the demands."""
        return worst(self.verdicts.values())


def judge(own: Sequence[Item], reference: Sequence[Item] | None, demands: Demands) -> Judgement:
    """Judge one candidate's items against the baseline's.

    A demand is met when the whole interval lies above it, rejected when the whole interval lies at or below
    it, and undecided in between.

    Raises:
        StageError: The two were evaluated on different rows, or their perplexities cannot be compared.
    """
    value = estimate(demands.metric, own, demands.confidence)
    verdicts = {}
    if demands.threshold is not None:
        verdicts["threshold"] = decide(value, demands.threshold, SIGN[demands.metric])
    if reference is None:
        return Judgement(own[0].model, value, verdicts=verdicts, rows=len(own))
    comparison = _COMPARE[demands.metric](_paired(own, reference), demands.confidence)
    verdicts["improvement"] = _improvement(comparison, demands)
    baseline = estimate(demands.metric, reference, demands.confidence)
    return Judgement(own[0].model, value, baseline, comparison, verdicts, len(own))


def decide(estimate: Estimate, demand: float, sign: int = 1) -> Verdict:
    """Decide by where the interval lies; `sign` is -1 where lower values are better."""
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    if low > sign * demand:
        return Verdict.COMPLETED
    return Verdict.REJECTED if high <= sign * demand else Verdict.INCONCLUSIVE


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts: one rejection rejects all, one doubt leaves all in doubt."""
    return max(verdicts, key=_ORDER.index)


def require_items(items: Sequence[Item], where: str) -> None:
    """Refuse to judge a model that the report is not about.

    Raises:
        StageError: There are no items.
    """
    if not items:
        raise StageError(
            "the report has no items of this model",
            where=where,
            fix="add the model to the `models` of the evaluation",
        )


def require_answers(items: Sequence[Item], where: str) -> None:
    """Refuse a score of exactly 0 or 1 that says only that generation went wrong.

    Raises:
        StageError: Every answer is empty or was cut off.
    """
    problem = no_answers(items)
    if problem is None:
        return
    counts = counts_of(items)
    raise StageError(
        f"a score of exactly {estimate(Metric.EXACT_MATCH, items).value:g} is no result here: {problem}",
        where=where,
        found=f"of {counts.rows} answers {counts.empty} empty, {counts.truncated} cut off",
        fix="raise `max_new_tokens`; look at the model's template and its end-of-sequence tokens",
    )


def no_answers(items: Sequence[Item]) -> str | None:
    """Say how a score of exactly 0 or 1 rests on no answer at all; None when it rests on some."""
    if estimate(Metric.EXACT_MATCH, items).value not in (0.0, 1.0):
        return None
    if not all(item.empty or item.truncated for item in items):
        return None
    counts = counts_of(items)
    if counts.empty == counts.rows:
        return "every answer is empty"
    return (
        "every answer was cut off"
        if counts.truncated == counts.rows
        else "every answer is empty or was cut off"
    )


def _improvement(comparison: Comparison, demands: Demands) -> Verdict:
    verdict = decide(comparison.estimate, demands.min_improvement)
    exact = comparison.p_value
    if verdict != Verdict.COMPLETED or demands.min_improvement < 0 or exact is None:
        return verdict
    # The interval is approximate: on few items the exact test must agree that there is a difference at all.
    return verdict if exact <= 1 - demands.confidence else Verdict.INCONCLUSIVE


def _paired(own: Sequence[Item], reference: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Match two models' items by row."""
    mine, theirs = {item.row: item for item in own}, {item.row: item for item in reference}
    if mine.keys() != theirs.keys():
        raise StageError(
            "candidate and baseline were not evaluated on the same rows",
            found=f"{len(mine)} and {len(theirs)} rows, {len(mine.keys() & theirs.keys())} in common",
            fix="evaluate both in one `evaluate` stage",
        )
    return [(item, theirs[row]) for row, item in mine.items()]


def _compare_answers(pairs: Sequence[tuple[Item, Item]], confidence: float) -> Comparison:
    return compare_binary(
        [a.correct is True for a, _ in pairs], [b.correct is True for _, b in pairs], confidence
    )


def _compare_likelihoods(pairs: Sequence[tuple[Item, Item]], confidence: float) -> Comparison:
    if any(a.tokens != b.tokens for a, b in pairs):
        raise StageError(
            "perplexities per token cannot be compared: the models cut the same text into different tokens",
            fix="compare models of one tokenizer and template, or use another metric",
        )
    own, theirs, tokens = zip(*((a.nll or 0.0, b.nll or 0.0, a.tokens or 0) for a, b in pairs), strict=True)
    return compare_ratios(own, theirs, tokens, confidence)


def _compare_steps(pairs: Sequence[tuple[Item, Item]], confidence: float) -> Comparison:
    if any(a.steps != b.steps for a, b in pairs):
        raise StageError(
            "step accuracies cannot be compared: the models were asked about different steps",
            fix="evaluate both in one `evaluate.steps` stage",
        )
    wrong = [[(item.steps or 0) - (item.right or 0) for item in pair] for pair in pairs]
    own, theirs = zip(*wrong, strict=True)
    return compare_ratios(own, theirs, [a.steps or 0 for a, _ in pairs], confidence)


_COMPARE = {
    Metric.EXACT_MATCH: _compare_answers,
    Metric.PERPLEXITY: _compare_likelihoods,
    Metric.PAIR_ACCURACY: _compare_answers,
    Metric.STEP_ACCURACY: _compare_steps,
}
