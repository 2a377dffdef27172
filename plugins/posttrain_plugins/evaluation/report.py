"""The evaluation report on disk: figures in `report.json`, one line per model and item in `items.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from posttrain.artifacts.kinds import ReportFacts
from posttrain.artifacts.manifest import canonical
from posttrain.contracts.stage import Input
from posttrain.errors import StageError
from posttrain_plugins.evaluation.scores import Estimate, perplexity, proportion, ratio

REPORT = "report.json"
ITEMS = "items.jsonl"
SHORT = 8
"""Hexadecimal digits of a model's digest in the names of figures."""


class Metric(StrEnum):
    """What an evaluation measures."""

    EXACT_MATCH = "exact_match"
    PERPLEXITY = "perplexity"
    PAIR_ACCURACY = "pair_accuracy"
    STEP_ACCURACY = "step_accuracy"


class Item(BaseModel):
    """One model's answer to one dataset row.

    Args:
        model: Digest of the model.
        row: Identity of the row: a hash of its content, numbered where the same row occurs twice.
        prompt: Hash of its prompt.
        prediction: The generated text, None where nothing was generated.
        target: The reference text, None where no metric needs it.
        correct: Whether the model ended its turn and the texts agree; of a pair, whether the better answer gets more.
        finished: Whether the model ended its turn within the length limit.
        generated: Number of generated tokens.
        nll: Σ −log p(token) over the completion, in nats.
        tokens: Number of scored tokens of the completion.
        margin: By how much the better answer of a pair gets more.
        steps: Number of steps of an answer that have a label.
        right: How many of them are judged as their label says.
        good: How many of them have a label that says they are right.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    row: str
    prompt: str
    prediction: str | None = None
    target: str | None = None
    correct: bool | None = None
    finished: bool | None = None
    generated: int | None = None
    nll: float | None = None
    tokens: int | None = None
    margin: float | None = None
    steps: int | None = None
    right: int | None = None
    good: int | None = None

    @property
    def empty(self) -> bool:
        """Whether an answer was generated and is empty text."""
        return self.prediction is not None and not self.prediction.strip()

    @property
    def truncated(self) -> bool:
        """Whether the answer ran into the length limit."""
        return self.finished is False


class Counts(BaseModel):
    """Rows of one model's evaluation, and how many of its generations are suspicious."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int
    empty: int = 0
    truncated: int = 0


def reported(models: Sequence[Input]) -> ReportFacts:
    """Return what is known of a report about some models before it is made."""
    subjects = tuple(dict.fromkeys(model.artifact.digest for model in models if model.artifact is not None))
    return ReportFacts(
        report="evaluation", subjects=subjects if all(each.verified for each in models) else None
    )


def counts_of(items: Sequence[Item]) -> Counts:
    """Count the rows whose prediction is empty text, and those that ran into the length limit."""
    return Counts(
        rows=len(items),
        empty=sum(item.empty for item in items),
        truncated=sum(item.truncated for item in items),
    )


def unanswered(items: Iterable[Item]) -> dict[str, float] | None:
    """Return the share of answers that are empty or cut off, by model; None where nothing was generated."""
    answered = (item for item in items if item.prediction is not None)
    shares = {
        model: sum(item.empty or item.truncated for item in own) / len(own)
        for model, own in _by_model(answered).items()
    }
    return shares or None


def estimate(metric: Metric, items: Sequence[Item], confidence: float = 0.95) -> Estimate:
    """Return one metric of one model over its items."""
    return _ESTIMATE[metric](items, confidence)


def _share(metric: Metric, items: Sequence[Item], confidence: float) -> Estimate:
    answers = [item.correct for item in items if item.correct is not None]
    if not answers:
        raise _unmeasured(metric)
    return proportion(sum(answers), len(answers), confidence)


def _perplexity(items: Sequence[Item], confidence: float) -> Estimate:
    scored = [(item.nll, item.tokens) for item in items if item.nll is not None and item.tokens]
    if not scored:
        raise _unmeasured(Metric.PERPLEXITY)
    nlls, tokens = zip(*scored, strict=True)
    return perplexity(nlls, tokens, confidence)


def _steps(items: Sequence[Item], confidence: float) -> Estimate:
    judged = [(item.right, item.steps) for item in items if item.right is not None and item.steps]
    if not judged:
        raise _unmeasured(Metric.STEP_ACCURACY)
    right, steps = zip(*judged, strict=True)
    return ratio(right, steps, confidence)


_ESTIMATE: Mapping[Metric, Callable[[Sequence[Item], float], Estimate]] = {
    Metric.EXACT_MATCH: partial(_share, Metric.EXACT_MATCH),
    Metric.PERPLEXITY: _perplexity,
    Metric.PAIR_ACCURACY: partial(_share, Metric.PAIR_ACCURACY),
    Metric.STEP_ACCURACY: _steps,
}


def _unmeasured(metric: Metric) -> StageError:
    return StageError(
        f"the evaluation has no item with {metric}",
        expected="at least one",
        fix=f"evaluate with `metrics: [{metric}]` on data that has it",
    )


def write_report(
    directory: Path, items: Iterable[Item], metrics: Sequence[Metric], data: str
) -> Mapping[str, Mapping[Metric, Estimate]]:
    """Write both files and return every model's figures.

    Args:
        directory: The output directory.
        items: Every model's items.
        metrics: What was measured.
        data: Digest of the dataset.
    """
    by_model = _by_model(items)
    figures = {
        model: {metric: estimate(metric, own) for metric in metrics} for model, own in by_model.items()
    }
    models = {
        model: {
            "metrics": {metric: value.as_dict() for metric, value in figures[model].items()},
            "counts": counts_of(own).model_dump(),
        }
        for model, own in by_model.items()
    }
    text = json.dumps({"data": data, "models": models}, indent=2, sort_keys=True, allow_nan=False)
    (directory / REPORT).write_text(text + "\n", encoding="utf-8")
    with (directory / ITEMS).open("wb") as file:
        for own in by_model.values():
            file.writelines(canonical(item.model_dump(exclude_none=True)) + b"\n" for item in own)
    return figures


def read_items(directory: Path) -> dict[str, list[Item]]:
    """Return the items of a report by model digest."""
    with (directory / ITEMS).open("rb") as file:
        return _by_model(Item.model_validate_json(line) for line in file)


def named_figures(figures: Mapping[str, Mapping[Metric, Estimate]]) -> dict[str, float]:
    """Return figures for the table: `exact_match`, or `exact_match[3f2c9a1b]` for each of several models."""
    alone = len(figures) == 1
    return {
        str(metric) if alone else f"{metric}[{model[:SHORT]}]": value.value
        for model, own in figures.items()
        for metric, value in own.items()
    }


def _by_model(items: Iterable[Item]) -> dict[str, list[Item]]:
    grouped: dict[str, list[Item]] = {}
    for item in items:
        grouped.setdefault(item.model, []).append(item)
    return grouped
