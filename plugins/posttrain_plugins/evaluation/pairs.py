"""What the stage `evaluate.preferences` runs in its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.artifacts.kinds import Kind, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Judge
from posttrain.errors import Interrupted
from posttrain_plugins.data.rows import prompt_hash, read_rows
from posttrain_plugins.data.tasks import chosen_rows
from posttrain_plugins.evaluation.preferences import PreferencesConfig
from posttrain_plugins.evaluation.report import Item, Metric, named_figures, write_report
from posttrain_plugins.evaluation.rewards import values_of
from posttrain_plugins.models.policy import usable_device
from posttrain_plugins.models.valued import open_valued
from posttrain_plugins.preparation.dataset import named_format
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.trainers.reward import Reward

Rows = Mapping[str, Mapping[str, Any]]
"""Rows by their identity."""


def run(context: StageContext) -> Outcome:
    """Score the pairs with every model and write the report."""
    config: PreferencesConfig = context.config
    data = context.input("data")
    rows = chosen_rows(read_rows(data), config.limit, config.seed)
    models = list({model.digest: model for model in context.inputs["models"]}.values())
    items: list[Item] = []
    for number, model in enumerate(models):
        items += _items(context, data, model, rows, (number, len(models)))
    figures = write_report(context.output("report"), items, (Metric.PAIR_ACCURACY,), data.digest)
    named = named_figures(figures)
    facts = ReportFacts(report="evaluation", figures=named, subjects=tuple(figures), data=data.digest)
    context.describe("report", Kind.REPORT, facts)
    shown = ", ".join(
        f"{value.value:.4g} [{value.low:.3g}, {value.high:.3g}] of {value.count}"
        for own in figures.values()
        for value in own.values()
    )
    return Outcome(figures=named, summary=f"{Metric.PAIR_ACCURACY} {shown}")


def _items(
    context: StageContext, data: Artifact, model: Artifact, rows: Rows, turn: tuple[int, int]
) -> list[Item]:
    """Return what one model says of each pair."""
    policy = open_valued(model, context, Kind.REWARD_MODEL, device=usable_device())
    prepared = prepare(
        Reward(),
        rows.values(),
        policy.encoder,
        named_format(context, "preference"),
        max_length=model.facts.context,
        truncation="error",
        weight_column=None,
        supervise=Judge.END,
        directory=data.path,
    )
    if turn[0] == 0:
        for level, text in prepared.notes:
            context.note(text, level)

    def report(done: int, total: int) -> None:
        context.progress(turn[0] * total + done, turn[1] * total, "pairs")
        if context.stopping:
            raise Interrupted(
                "the evaluation was stopped", fix="`posttrain resume` evaluates again from the start"
            )

    values = values_of(policy.model, prepared.examples, context.config.batch_tokens, report)
    named = list(rows.items())
    items = [_item(model, *named[row], rewards) for row, rewards in sorted(values.items())]
    _warn_of_ties(context, model, list(values.values()))
    return items


def _item(model: Artifact, identity: str, row: Mapping[str, Any], rewards: Sequence[float]) -> Item:
    chosen, rejected = rewards
    return Item(
        model=model.digest,
        row=identity,
        prompt=prompt_hash(row, "preference"),
        correct=chosen > rejected,
        margin=chosen - rejected,
    )


def _warn_of_ties(context: StageContext, model: Artifact, rewards: Sequence[Sequence[float]]) -> None:
    """Say when the model tells most answers not apart; each of these pairs counts as wrong."""
    ties = sum(chosen == rejected for chosen, rejected in rewards)
    if 2 * ties > len(rewards):
        context.note(
            f"{model.ref} gives both answers of {ties} of {len(rewards)} pairs the same number", Level.WARNING
        )
