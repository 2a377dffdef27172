"""What the stage `evaluate.steps` runs in its worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.errors import DataError
from posttrain_plugins.data.rows import prompt_hash, read_rows
from posttrain_plugins.data.tasks import chosen_rows
from posttrain_plugins.evaluation.report import Item, Metric, named_figures
from posttrain_plugins.evaluation.reporting import Progress, items_of, put_out, shares_told
from posttrain_plugins.evaluation.steps import StepsConfig
from posttrain_plugins.losses.process_reward.metrics import EVEN
from posttrain_plugins.models.policy import usable_device
from posttrain_plugins.rewards.process import ProcessScorer, StepScores

Rows = Mapping[str, Mapping[str, Any]]
"""Rows by their identity."""


def run(context: StageContext) -> Outcome:
    """Judge the steps with every model and write the report."""
    config: StepsConfig = context.config
    rows = chosen_rows(read_rows(context.input("data")), config.limit, config.seed)

    def judge(model: Artifact, progress: Sequence[Progress]) -> list[Item]:
        return _items(context, model, rows, progress[0])

    items = items_of(context, judge, "answers")
    figures = put_out(context, items, (Metric.STEP_ACCURACY,))
    own = next(iter(figures))
    majority = share_of_majority([item for item in items if item.model == own])
    told = f"{Metric.STEP_ACCURACY} {shares_told(figures, ' steps')}"
    return Outcome(
        figures={**named_figures(figures), "majority": majority},
        summary=f"{told}; always the commoner label {majority:.4g}",
    )


def share_of_majority(items: Iterable[Item]) -> float:
    """Return the step accuracy of one who always says the commoner label."""
    counts = [(item.good or 0, item.steps or 0) for item in items]
    good, steps = sum(right for right, _ in counts), sum(given for _, given in counts)
    return max(good, steps - good) / steps


def _items(context: StageContext, model: Artifact, rows: Rows, progress: Progress) -> list[Item]:
    """Return what one model says of each answer."""
    config: StepsConfig = context.config
    scorer = ProcessScorer.open(
        model,
        context,
        separator=config.step_separator,
        batch_tokens=config.batch_tokens,
        device=usable_device(),
    )
    found = scorer.score(list(rows.values()), lambda done: progress(done, len(rows)))
    for text, count in scorer.account.remarks.counts.items():
        context.note(f"{count} row(s): {text}", Level.WARNING)
    return [
        _item(model, identity, row, scores)
        for (identity, row), scores in zip(rows.items(), found, strict=True)
    ]


def _item(model: Artifact, identity: str, row: Mapping[str, Any], scores: StepScores | None) -> Item:
    if scores is None:
        raise DataError(
            "this answer is longer than the model can take, so it cannot be judged",
            where=f"{model.ref}, row {identity}",
            fix="leave such rows out",
        )
    said = _sided(row["labels"], scores.log_odds)
    return Item(
        model=model.digest,
        row=identity,
        prompt=prompt_hash(row, "stepwise"),
        steps=len(said),
        right=sum(right == odd for right, odd in said),
        good=sum(right for right, _ in said),
    )


def _sided(labels: Sequence[float], log_odds: Sequence[float]) -> list[tuple[bool, bool]]:
    """Return whether a step is right and whether the model holds it to be, where its label has a side."""
    pairs = zip(map(float, labels), log_odds, strict=True)
    return [(label > EVEN, value > 0) for label, value in pairs if label != EVEN]
