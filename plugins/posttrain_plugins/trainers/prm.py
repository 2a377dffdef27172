"""Process reward models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format, Row
from posttrain.contracts.loss import Family, Need, ProcessRewardBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, Scores, StepEnds
from posttrain.errors import DataError
from posttrain_plugins.data.formats.stepwise import in_steps, labels_problem
from posttrain_plugins.data.judging.labels import LABELLED
from posttrain_plugins.losses.process_reward.metrics import EVEN
from posttrain_plugins.trainers.valued import ValuedOptions, ValuedTrainer


class PrmOptions(ValuedOptions):
    """Options of `train.prm`."""

    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate")
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.PROCESS_REWARD),))] = Field(
        default=Choice(name="step_cross_entropy"), description="a loss over the steps of answers"
    )
    step_separator: str = Field(
        default="\n",
        description="what ends every step that is a string; it is added to steps that do not end with it, and the "
        "model is asked at its last token. Steps that are turns end as the chat template ends them",
    )
    train_on_last_step_only: bool = Field(
        default=False, description="learn the label of each answer's last step alone; all are evaluated"
    )


class Prm(ValuedTrainer):
    """Train a process reward model, which tells of every step of an answer whether it is right up to there.

    The policy's language model head is replaced by one with two outputs, wrong and right, which are read at the last
    token of each step (Lightman et al. 2023, https://arxiv.org/abs/2305.20050). Dropout is off.
    """

    config = PrmOptions
    family = Family.PROCESS_REWARD
    kind = Kind.PROCESS_REWARD_MODEL
    numbers = "log-odds of a right step"
    formats = frozenset({"stepwise"})

    def passages(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[Passage] | str:
        """The answer, with where its steps end."""
        return (in_steps(row),)

    def supervise(self, config: PrmOptions) -> StepEnds:
        """Ends of steps: the last one's alone, where the options say so."""
        return StepEnds(config.step_separator, config.train_on_last_step_only)

    def supervise_held_out(self, config: PrmOptions) -> StepEnds:
        """Ends of all steps."""
        return StepEnds(config.step_separator)

    def verdicts(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[float]:
        """The labels as probabilities, whatever type the column has."""
        problem = labels_problem(row)
        if problem:
            raise DataError(problem, fix="give every step true, false or a probability")
        return [float(label) for label in row["labels"]]

    def remarks(self, examples: Sequence[Example]) -> Sequence[str]:
        """Labels that are all on one side: a model learns nothing from them but to say so."""
        labels = (label for example in examples for label in example.verdicts)
        return LABELLED["stepwise"].remarks(labels)

    def batch(self, scores: Scores, config: Any) -> ProcessRewardBatch:
        """Put the log-odds at the ends of steps beside the labels."""
        assert scores.value is not None, "models with a head for numbers give them"
        return ProcessRewardBatch(
            logit=scores.value,
            label=scores.verdicts,
            example=scores.sequence,
            weight=scores.weight[scores.sequence],
        )

    def judged(self, examples: Sequence[Example], values: Mapping[int, Sequence[float]]) -> tuple[int, int]:
        """Count the steps whose odds are on the side of their label; a label of one half has no side."""
        said = [
            (label, value)
            for example in examples
            for label, value in zip(example.verdicts, values[example.row], strict=True)
            if label != EVEN
        ]
        return sum((value > 0) == (label > EVEN) for label, value in said), len(said)
