"""What the stage `evaluate.preferences` runs in its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain_plugins.data.rows import prompt_hash, read_rows
from posttrain_plugins.data.tasks import chosen_rows
from posttrain_plugins.evaluation.answers import READERS
from posttrain_plugins.evaluation.preferences import PreferencesConfig
from posttrain_plugins.evaluation.report import Item, Metric, named_figures
from posttrain_plugins.evaluation.reporting import Progress, items_of, put_out, shares_told
from posttrain_plugins.preparation.dataset import named_format
from posttrain_plugins.preparation.examples import prepare

Rows = Mapping[str, Mapping[str, Any]]
"""Rows by their identity."""


def run(context: StageContext) -> Outcome:
    """Score the pairs with every model and write the report."""
    config: PreferencesConfig = context.config
    rows = chosen_rows(read_rows(context.input("data")), config.limit, config.seed)
    noted: set[str] = set()

    def judge(model: Artifact, progress: Sequence[Progress]) -> list[Item]:
        return _items(context, model, rows, progress[0], noted)

    figures = put_out(context, items_of(context, judge, "pairs"), (Metric.PAIR_ACCURACY,))
    return Outcome(figures=named_figures(figures), summary=f"{Metric.PAIR_ACCURACY} {shares_told(figures)}")


def _items(
    context: StageContext, model: Artifact, rows: Rows, progress: Progress, noted: set[str]
) -> list[Item]:
    """Return what one model says of each pair; what was not noted of another one is."""
    reader = READERS[model.kind]
    policy = reader.open(model, context)
    prepared = prepare(
        reader.trainer,
        rows.values(),
        policy.encoder,
        named_format(context, "preference"),
        max_length=model.facts.context,
        truncation="error",
        weight_column=None,
        supervise=reader.supervise,
        directory=context.input("data").path,
    )
    for level, text in prepared.notes:
        if text not in noted:
            context.note(text, level)
            noted.add(text)
    numbers = reader.read(policy, prepared, context, progress)
    named = list(rows.items())
    items = [_item(model, *named[row], pair) for row, pair in sorted(numbers.items())]
    _warn_of_ties(context, model, list(numbers.values()))
    return items


def _item(model: Artifact, identity: str, row: Mapping[str, Any], pair: tuple[float, float]) -> Item:
    chosen, rejected = pair
    return Item(
        model=model.digest,
        row=identity,
        prompt=prompt_hash(row, "preference"),
        correct=chosen > rejected,
        margin=chosen - rejected,
    )


def _warn_of_ties(context: StageContext, model: Artifact, pairs: Sequence[tuple[float, float]]) -> None:
    """Say when the model tells most answers not apart; each of these pairs counts as wrong."""
    ties = sum(chosen == rejected for chosen, rejected in pairs)
    if 2 * ties > len(pairs):
        context.note(
            f"{model.ref} gives both answers of {ties} of {len(pairs)} pairs the same number", Level.WARNING
        )
