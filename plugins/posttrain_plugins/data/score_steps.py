"""The stage `data.score_steps`: what a process reward model says of the steps of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.artifacts.kinds import DatasetFacts, Kind
from posttrain.contracts.stage import (
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageConfig,
    StageContext,
)
from posttrain.errors import DataError
from posttrain_plugins.data.rows import SHARED, read_rows, write_rows
from posttrain_plugins.rewards.aggregation import Aggregation
from posttrain_plugins.rewards.step_options import StepOptions, unseparated
from posttrain_plugins.rewards.steps import Style
from posttrain_plugins.stopping import pauses

if TYPE_CHECKING:
    from posttrain_plugins.rewards.process import ProcessScorer, StepScores

SCORED = "scored"
GIVEN = frozenset({"prompt_completion", SCORED, "unpaired_preference", "stepwise"})
"""Formats with a prompt and one answer to it."""
_EMPTY = "no step, as the answer is empty"
_LONG = "longer than the model can take"


class ScoreStepsConfig(StepOptions, StageConfig):
    """Options of `data.score_steps`."""


class ScoreSteps(Stage):
    """Score answers with a process reward model (Lightman et al. 2023, https://arxiv.org/abs/2305.20050).

    Each row gets its score, its steps and how likely the model holds the answer to be right up to the end of each.
    """

    config = ScoreStepsConfig
    shared = SHARED
    inputs = (
        Port("model", frozenset({Kind.PROCESS_REWARD_MODEL})),
        Port("data", frozenset({Kind.DATASET}), formats=GIVEN),
    )
    target = "posttrain_plugins.data.score_steps:run"
    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {}

    def outputs(self, config: ScoreStepsConfig) -> tuple[Port, ...]:
        """The rows with their scores."""
        return (Port("data", frozenset({Kind.DATASET}), formats=frozenset({SCORED})),)

    def predict(self, config: ScoreStepsConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict scored rows of the same policy."""
        facts = inputs["data"][0].facts
        made = DatasetFacts(format=SCORED, policy=facts.policy, conversational=facts.conversational)
        return {"data": Prediction(Kind.DATASET, made)}

    def check(self, config: ScoreStepsConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a model of which nothing tells what ended its steps."""
        return unseparated(inputs["model"][0], config.step_separator, "score-steps", "model")


@dataclass(frozen=True)
class _Answer:
    """A row of the data and its answer in steps."""

    row: Mapping[str, Any]
    steps: Mapping[str, Any]

    def scored(self, scores: StepScores, aggregation: Aggregation) -> dict[str, Any]:
        """Return the row with its score."""
        dropped = ("completions", "labels", "label")
        others = {name: value for name, value in self.row.items() if name not in dropped}
        return {
            "completion": _whole(self.row),
            **others,
            "score": scores.reward(aggregation),
            "steps": self.steps["completions"],
            "step_probabilities": list(scores.probabilities),
        }


def run(context: StageContext) -> Outcome:
    """Score every answer and write the rows."""
    from posttrain_plugins.models.policy import usable_device
    from posttrain_plugins.rewards.process import ProcessScorer

    config: ScoreStepsConfig = context.config
    data, model = context.input("data"), context.input("model")
    answers = [_Answer(row, _in_steps(row, config.style)) for row in read_rows(data)]
    asked = [answer for answer in answers if answer.steps["completions"]]
    scorer = ProcessScorer.open(
        model,
        context,
        separator=config.step_separator,
        batch_tokens=config.batch_tokens,
        device=usable_device(),
    )
    found = _scores(context, scorer, asked)
    rows = [
        answer.scored(scores, config.aggregation)
        for answer, scores in zip(asked, found, strict=True)
        if scores is not None
    ]
    if not rows:
        raise DataError("no answer has a score", where=data.ref, found=f"{len(answers)} rows, none scored")
    for reason, count in ((_EMPTY, len(answers) - len(asked)), (_LONG, len(asked) - len(rows))):
        if count:
            context.note(f"{count} row(s) left out: {reason}", Level.WARNING)
    facts = write_rows(context.output("data"), rows, SCORED, policy=data.facts.policy)
    context.describe("data", Kind.DATASET, facts)
    figures = _figures(rows, len(answers))
    summary = f"{len(rows)} answers, {figures['steps']:.1f} steps each, mean score {figures['score']:.4f}"
    return Outcome(figures=figures, summary=summary)


def _scores(
    context: StageContext, scorer: ProcessScorer, asked: Sequence[_Answer]
) -> list[StepScores | None]:
    pause = pauses(context, "answers", "scoring")
    found = scorer.score([answer.steps for answer in asked], lambda done: pause(done, len(asked)))
    for text in scorer.account.remarks.counts:
        context.note(f"{scorer.account.remarks.counts[text]} row(s): {text}", Level.WARNING)
    return found


def _in_steps(row: Mapping[str, Any], style: Style | None) -> dict[str, Any]:
    from posttrain_plugins.rewards.process import answered

    if "completions" in row:
        return {**row}
    return {**row, **answered(row["prompt"], row["completion"], style)}


def _whole(row: Mapping[str, Any]) -> Any:
    from posttrain_plugins.data.formats.conversions import whole

    return row["completion"] if "completion" in row else whole(row["prompt"], row["completions"])


def _figures(rows: Sequence[Mapping[str, Any]], given: int) -> dict[str, float]:
    return {
        "rows": float(len(rows)),
        "rows_dropped": float(given - len(rows)),
        "score": sum(row["score"] for row in rows) / len(rows),
        "steps": sum(len(row["steps"]) for row in rows) / len(rows),
    }
