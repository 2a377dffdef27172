"""Reward models: a number for an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Family, Need, RewardBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import Finding, Input, Inputs, Level
from posttrain.contracts.trainer import Example, Judge, Scores
from posttrain.errors import DataError
from posttrain_plugins.data.formats.scored import scores_problem
from posttrain_plugins.data.formats.values import ALL_OR_NONE, MARGIN, margin_problem
from posttrain_plugins.data.judging.flaws import UNMARGINED
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.registrations.losses import REWARD
from posttrain_plugins.trainers.valued import ValuedOptions, ValuedTrainer
from posttrain_plugins.training.objective import known_needs
from posttrain_plugins.training.options import EVALUATION

Row = Mapping[str, Any]
_SIDES = (1.0, 0.0)
"""What the answers of a preference are worth: the chosen one, the rejected one."""


class RewardOptions(ValuedOptions):
    """Options of `train.reward`."""

    truncation: Literal["drop", "error"] = Field(
        default="drop",
        description="what becomes of a row with an answer that is too long: it is dropped and counted, or training "
        "stops with an error; a shortened answer would be judged for what it is not",
    )
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.REWARD),))] = Field(
        default=Choice(name="bradley_terry"), description="a loss over the rewards of answers"
    )


class Reward(ValuedTrainer):
    """Train a reward model: one number for an answer, read at its last token (https://arxiv.org/abs/2203.02155).

    It starts from a policy, which gets a fresh head in place of its own, or goes on with a reward model. Rows of
    preferences may say in a column `margin` by how much the rewards should differ at least.
    """

    config = RewardOptions
    family = Family.REWARD
    kind = Kind.REWARD_MODEL
    numbers = "rewards"
    formats = frozenset({"preference", "scored", "ranked"})
    sequences = 2

    def supervise(self, config: Any) -> Judge:
        """The last token, where the model has seen all of the answer."""
        return Judge.END

    def check(self, config: RewardOptions, inputs: Inputs) -> Iterable[Finding]:
        """Report single answers for a loss that compares, and margins for one that does not read them."""
        yield from super().check(config, inputs)
        needs = known_needs(self, config)
        if needs is None:
            return
        for port in ("data", EVALUATION):
            for data in inputs.get(port, ()):
                yield from _misfits(config.loss.name, needs, port, data)

    def rows(self, rows: Iterable[Row], format: Format, needs: frozenset[Need], seed: int) -> Iterator[Row]:
        """Refuse a needed margin that only some rows have."""
        first: bool | None = None
        rows = iter(rows)
        for number, row in enumerate(rows, 1):
            has = MARGIN in row and Need.MARGIN in needs
            first = has if first is None else first
            if has != first:
                before, rest = number - 1, [MARGIN in each for each in rows]
                having = before * first + has + sum(rest)
                raise DataError(
                    _some_margins(having, number + len(rest)),
                    where=f"row {number} is the first that has {'one' if has else 'none'}",
                    fix=ALL_OR_NONE,
                )
            yield row

    def passages(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[Passage] | str:
        """The answers to one prompt, unless nothing tells them apart."""
        if Need.RIVALS in needs and len(set(_scores(row, format))) == 1:
            return "all answers have the same score"
        if "chosen" in format.columns and row["chosen"] == row["rejected"]:
            return "chosen and rejected are the same"
        return format.passages(row)

    def verdicts(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[float]:
        """The score of each answer, then the margin where a loss needs it."""
        problem = scores_problem(row, format.columns)
        if problem:
            raise DataError(problem, fix="write a finite number")
        if Need.MARGIN in needs and (problem := margin_problem(row)):
            raise DataError(problem, fix=f"write a finite number, or {_RENAME}")
        margin = (float(row.get(MARGIN, 0.0)),) if Need.MARGIN in needs else ()
        return (*map(float, _scores(row, format)), *margin)

    def batch(self, scores: Scores, config: Any) -> RewardBatch:
        """Put each reward beside its score."""
        assert scores.value is not None, "a reward model gives numbers"
        counts = scores.lengths.new_tensor([len(example.sequences) for example in scores.examples])
        said = [each for example in scores.examples for each in example.verdicts[: len(example.sequences)]]
        margin: Any = None
        if Need.MARGIN in scores.needs:
            margin = scores.value.new_tensor([example.verdicts[-1] for example in scores.examples])
        return RewardBatch(
            reward=scores.value,
            score=scores.value.new_tensor(said),
            example=counts.new_ones(len(counts)).cumsum(0).sub(1).repeat_interleave(counts),
            weight=scores.weight,
            margin=margin,
        )

    def judged(self, examples: Sequence[Example], values: Mapping[int, Sequence[float]]) -> tuple[int, int]:
        """Count the pairs of answers of which the better one gets more."""
        right = total = 0
        for example in examples:
            answers = list(zip(example.verdicts, values[example.row], strict=False))
            for score, reward in answers:
                lesser = [other for worse, other in answers if worse < score]
                right, total = right + sum(other < reward for other in lesser), total + len(lesser)
        return right, total


_RENAME = f"rename the column where it is something else: `columns: {{{MARGIN}: OTHER}}`"


def _some_margins(having: int, rows: int) -> str:
    return f"there is a `{MARGIN}` in {having} of {rows} rows"


def _misfits(loss: str, needs: frozenset[Need], port: str, data: Input) -> Iterable[Finding]:
    """Report what a dataset lacks for a loss, or has for nothing."""
    if Need.RIVALS in needs and data.facts.format == "scored":
        message = f"loss `{loss}` compares answers to one prompt, and the rows of {data.origin} hold one each"
        fix = "use `loss: regression`, or rows in the format `ranked` or `preference`"
        yield Finding("trainer", Level.ERROR, certainty(data), message, port=port, fix=fix)
    lacking, rows = (data.facts.flaws or {}).get(UNMARGINED, 0), data.facts.rows
    if Need.MARGIN in needs and lacking and rows is not None:
        message = f"{_some_margins(rows - lacking, rows)} of {data.origin}, and loss `{loss}` reads it"
        yield Finding("trainer", Level.ERROR, certainty(data), message, port=port, fix=ALL_OR_NONE)
    if Need.MARGIN not in needs and MARGIN in (data.facts.columns or ()):
        message = f"the column `{MARGIN}` of {data.origin} is not used: loss `{loss}` does not read it"
        fix = f"use a loss that does ({', '.join(_reading_margins())}), or leave the column"
        yield Finding("trainer", Level.NOTE, certainty(data), message, port=port, fix=fix)


def _reading_margins() -> list[str]:
    """Return the built-in losses that read margins."""
    return [each.name for each in REWARD if Need.MARGIN in load_target(each.target).needs]


def _scores(row: Row, format: Format) -> Sequence[float]:
    """Return what the data says of each answer; other columns of these names may travel along."""
    if "scores" in format.columns:
        given: Sequence[float] = row["scores"]
        return given
    return (row["score"],) if "score" in format.columns else _SIDES
