"""What the stage `evaluate` runs in its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.errors import DataError
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.tasks import Task, tasks_of
from posttrain_plugins.evaluation.evaluate import EvaluateConfig
from posttrain_plugins.evaluation.likelihood import completion_nll
from posttrain_plugins.evaluation.report import Item, Metric, counts_of, named_figures
from posttrain_plugins.evaluation.reporting import Progress, items_of, put_out
from posttrain_plugins.models.policy import Policy, open_policy, usable_device
from posttrain_plugins.rollouts.generation import Generation, generate

_DIGITS = 6
"""Significant digits kept of a log-likelihood; those behind depend on how rows were batched."""


def run(context: StageContext) -> Outcome:
    """Evaluate every model on the same rows and write the report."""
    config: EvaluateConfig = context.config
    data = context.input("data")
    tasks = tasks_of(read_rows(data), data.facts.format, config.limit, config.seed)
    column = config.answer_from(data.facts.format)
    compared = tasks if Metric.EXACT_MATCH in config.metrics else []
    targets = [_target(task, column) for task in compared]

    def judge(model: Artifact, progress: Sequence[Progress]) -> list[Item]:
        own = _evaluate(context, model, tasks, targets, progress)
        _warn(context, model, own)
        return own

    named = named_figures(
        put_out(context, items_of(context, judge, "rows", len(config.metrics)), config.metrics)
    )
    shown = ", ".join(f"{name} {value:.4g}" for name, value in named.items())
    return Outcome(figures=named, summary=f"{shown}, n={len(tasks)}")


def _evaluate(
    context: StageContext,
    model: Artifact,
    tasks: Sequence[Task],
    targets: Sequence[str],
    progress: Sequence[Progress],
) -> list[Item]:
    """Return one model's items."""
    config: EvaluateConfig = context.config
    policy = open_policy(model, context, device=usable_device())
    columns = [
        _PASSES[metric](_Asked(context, policy, tasks, targets, told))
        for metric, told in zip(config.metrics, progress, strict=True)
    ]
    return [
        Item(
            model=model.digest,
            row=task.identity,
            prompt=task.hash,
            **{k: v for part in parts for k, v in part.items()},
        )
        for task, *parts in zip(tasks, *columns, strict=True)
    ]


@dataclass(frozen=True)
class _Asked:
    """What one pass over the tasks works with."""

    context: StageContext
    policy: Policy
    tasks: Sequence[Task]
    targets: Sequence[str]
    progress: Progress

    @property
    def config(self) -> EvaluateConfig:
        config: EvaluateConfig = self.context.config
        return config

    def warn(self, text: str) -> None:
        self.context.note(f"{self.policy.artifact.ref}: {text}", Level.WARNING)


def _answers(asked: _Asked) -> list[dict[str, Any]]:
    """Generate an answer to each task and compare it with the target."""
    policy, config = asked.policy, asked.config
    generations = generate(
        policy,
        [policy.encoder.encode_prompt(task.prompt, task.tools, task.arguments) for task in asked.tasks],
        max_new_tokens=config.max_new_tokens,
        batch_tokens=config.batch_tokens,
        progress=asked.progress,
    )
    return [_answer(policy, only, target) for (only,), target in zip(generations, asked.targets, strict=True)]


def _answer(policy: Policy, generation: Generation, target: str) -> dict[str, Any]:
    prediction = policy.encoder.decode(generation.tokens)
    # A turn marker in the midst of an answer is not text that the reference has, though decoding drops it.
    stray = policy.encoder.has_special(generation.tokens)
    return {
        "prediction": prediction,
        "target": target,
        "correct": generation.finished and not stray and prediction.strip() == target.strip(),
        "finished": generation.finished,
        "generated": len(generation.tokens),
    }


def _likelihoods(asked: _Asked) -> list[dict[str, Any]]:
    """Score the reference completion of each task; `targets` are not looked at."""
    encode = asked.policy.encoder.encode_pair
    sequences = [encode(task.prompt, _completion(task), task.tools, task.arguments) for task in asked.tasks]
    scores = completion_nll(
        asked.policy,
        sequences,
        batch_tokens=asked.config.batch_tokens,
        progress=asked.progress,
        warn=asked.warn,
    )
    return [{"nll": float(f"{nll:.{_DIGITS}g}"), "tokens": tokens} for nll, tokens in scores]


_PASSES = {Metric.EXACT_MATCH: _answers, Metric.PERPLEXITY: _likelihoods}


def _completion(task: Task) -> Any:
    if task.completion is None:
        raise DataError(
            "perplexity needs completions, and these rows are prompts alone",
            where="data",
            fix="use data in the format `prompt_completion` or `messages`",
        )
    return task.completion


def _target(task: Task, column: str | None) -> str:
    """Return the reference text of a task."""
    if column is None:
        return task.answer()
    if task.row.get(column) is None:
        raise DataError(
            "this row has no reference answer",
            where=f"row {task.identity}, column `{column}`",
            fix="fill the column, drop the row, or name another column with `answer_column`",
        )
    return str(task.row[column])


def _warn(context: StageContext, model: Artifact, items: Sequence[Item]) -> None:
    """Say when a figure rests on empty or cut-off answers."""
    counts = counts_of(items)
    for number, what in ((counts.empty, "are empty"), (counts.truncated, "ran into `max_new_tokens`")):
        if 2 * number > counts.rows:
            context.note(f"{number} of {counts.rows} answers of {model.ref} {what}", Level.WARNING)
